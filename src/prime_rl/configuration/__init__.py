"""Configuration: TOML files, command line and environment variables merged into one validated object."""
