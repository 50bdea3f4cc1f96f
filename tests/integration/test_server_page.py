"""The page of a training server in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_browser import Open, serve_page

from prime_rl.training_api.config import ServeConfig, ServedModelConfig
from prime_rl.training_api.futures import Future
from prime_rl.training_api.metrics import ServerMetrics
from prime_rl.utils.pydantic_config import write_config

pytestmark = pytest.mark.timeout(400)
OPEN = {"sessions": 2, "models": 1, "waiting": 3}


def log_interval(metrics: ServerMetrics, owner: str, num_requests: int) -> None:
    for _ in range(num_requests):
        metrics.observe(Future("m:0", owner, "s", "m", 0, 1, "optim_step"), b"{}")
    row = metrics.read({"queue/training": 3, "queue/sampling": 0, "open/models": 1})
    assert row is not None
    metrics.write(row, {owner: OPEN})


def test_page_of_a_server_follows_its_tenants_and_load(tmp_path: Path, open_page: Open) -> None:
    metrics = ServerMetrics(tmp_path)
    write_config(ServeConfig(model=ServedModelConfig(name="tiny-qwen3")), tmp_path / "configs" / "serve.toml")
    log_interval(metrics, "a" * 32, 5)
    with serve_page(tmp_path) as url:
        opened = open_page(url)
        assert opened.texts(".sentence")[0].startswith("Training API of tiny-qwen3: 1 tenant, 2 open sessions, 1 model")

        def first_row() -> list[str]:
            rows = opened.texts("section.panel tbody tr")
            return rows[0].split()[:5] if rows else []

        # Cells of a table that is not laid out yet have no space between them.
        opened.wait_until(lambda: first_row() == ["aaaaaaaa", "2", "1", "3", "5"], "the row of a tenant")
        log_interval(metrics, "b" * 32, 7)
        opened.wait_until(lambda: first_row() == ["bbbbbbbb", "2", "1", "3", "7"], "the row of a further tenant")
        assert len(opened.texts("section.panel tbody tr")) == 2
        opened.page.click("text=Curves")
        opened.page.wait_for_selector("text=unfinished requests")
        assert opened.page.locator("text=interval").count() and not opened.page.locator("text=training step").count()
