"""The engine that serves the very model code that is trained."""
