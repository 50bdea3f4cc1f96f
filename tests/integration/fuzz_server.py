"""Schemathesis against a real inference server: thousands of valid and invalid requests from its OpenAPI description.

python tests/integration/fuzz_server.py --max-examples 100     (make fuzz)

Checks: no 5xx but the documented ones; status, content type and error as described; invalid requests are rejected.
`/pause`, which would stop the other routes, is excluded; `test_server_routes.py` has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
from cli_runner import runner, until

from prime_rl.runtime.machine import find_free_port, is_healthy

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-examples", type=int, default=100, help="of each kind for each route")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    port = find_free_port()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place, runner(Path(place)) as run:
        model = ["--model.name", "tiny-qwen3", "--model.debug.random_init", "true", "--model.max_model_len", 64]
        server = run.start("inference", *model, "--output_dir", Path(place) / "out", "--server.port", port)
        until(lambda: is_healthy(None, port), "the server", server)
        code = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json"),
                *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--exclude-path", "/pause"),
                *("--max-examples", str(given.max_examples), "--seed", str(given.seed)),
                *("--request-timeout", "60", "--suppress-health-check", "all", "--continue-on-failure"),
            ],
            check=False,
        ).returncode
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        held = [line for line in lines if line.startswith(("prime_rl_requests_running ", "prime_rl_requests_waiting "))]
        sys.stdout.write(f"afterwards: {', '.join(held)}\n")
        left = any(float(line.split()[1]) for line in held)
    return code or int(left)


if __name__ == "__main__":
    sys.exit(main())
