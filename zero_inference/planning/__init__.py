"""What is decided before anything is loaded."""
