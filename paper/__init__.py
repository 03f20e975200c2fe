"""The paper's tables and figures as runnable definitions."""
