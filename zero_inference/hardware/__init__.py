"""The rooflines of this machine (copies, memory, matrix products, disk), measured in this process."""
