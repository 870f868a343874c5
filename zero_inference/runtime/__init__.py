"""What every part stands on: ranks, processes, signals, files, host memory, the compiled extension."""
