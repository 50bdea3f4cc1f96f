"""Looking at runs: the `monitor` command, the report page, the live page, and what explains and compares runs."""
