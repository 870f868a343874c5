"""What all cases of benchmarks/run_cases.py share."""
