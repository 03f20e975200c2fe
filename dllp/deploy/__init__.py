"""Export to other runtimes, and measured speed."""
