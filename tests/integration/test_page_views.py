"""Views of the page in a real browser: all runs, a run before its start, logs, prompts, exports, addresses."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from page_browser import Open, serve_page
from page_runs import metric_rows, write_context_search, write_evaluation, write_page_run

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.report import write_report
from prime_rl.runtime.run_state import StateRecorder
from rollouts.training.metrics import append_jsonl

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two evaluations of the same held-out prompts, and a log."""
    run = write_page_run(tmp_path_factory.mktemp("views") / "run", num_steps=6)
    write_evaluation(run, 0, [0.0, 0.0, 1.0, 0.0])
    write_evaluation(run, 5, [1.0, 0.5, 1.0, 1.0])
    (run / "logs").mkdir()
    lines = ["12:00:01    INFO Step 1", "12:00:02 WARNING health check mask: <b>loss</b>", "12:00:03    INFO Step 2"]
    (run / "logs" / "trainer.log").write_text("\n".join(lines) + "\n")
    return run


@pytest.fixture(scope="module")
def report(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(open_run(run_dir), path)
    return path.as_uri()


def test_all_runs_are_listed_searched_compared_and_opened(tmp_path: Path, open_page: Open) -> None:
    root = tmp_path / "outputs"
    write_page_run(root / "long name" / "rl", num_steps=6)
    with serve_page(root) as url:
        opened = open_page(url)
        page = opened.page
        assert opened.texts(".runs .what a") == ["long name/rl"]
        write_page_run(root / "other", num_steps=3)
        opened.wait_until(lambda: len(opened.texts(".runs .what a")) == 2, "a run that started later")
        with StateRecorder(root / "other", "rl"):
            opened.wait_until(lambda: "running" in opened.texts(".runs .badge"), "the state of a run")
            assert opened.texts(".runs .what a")[0] == "other", "running ones first"
        page.fill("input[aria-label='search runs']", "LONG")
        opened.wait_until(lambda: opened.texts(".runs .what a") == ["long name/rl"], "the search")
        page.fill("input[aria-label='search runs']", "")
        for key in ("other", "long name/rl"):
            page.check(f"input[aria-label='compare {key}']")
        page.wait_for_selector(".differences tbody tr")
        assert opened.texts(".differences tbody tr")[0].split() == ["trainer", "max_steps", "3", "6"]
        assert page.locator(".chart svg .line").count() == 2
        page.select_option("select[aria-label=metric]", "entropy/mean")
        opened.wait_until(lambda: opened.texts(".chart figcaption > b") == ["entropy/mean"], "the chosen metric")
        page.click("text=long name/rl >> nth=0")
        page.wait_for_selector(".sentence")
        assert "6 of 6 steps" in opened.texts(".sentence")[0]
        page.click("text=all runs")
        page.wait_for_selector(".runs li")
        page.close()  # before its server ends


def test_a_deleted_run_leaves_the_comparison(tmp_path: Path, open_page: Open) -> None:
    runs = {key: write_page_run(tmp_path / key, num_steps=3) for key in "abc"}
    with serve_page(tmp_path) as url:
        opened = open_page(url)
        for key in runs:
            opened.page.check(f"input[aria-label='compare {key}']")
        lines = opened.page.locator(".chart svg .line")
        opened.wait_until(lambda: lines.count() == 3, "all runs in one chart")
        shutil.rmtree(runs["c"])
        opened.wait_until(lambda: lines.count() == 2, "the other runs")


def test_a_page_waits_for_a_run_that_has_not_started(tmp_path: Path, open_page: Open) -> None:
    run = tmp_path / "later"
    with serve_page(run) as url:
        opened = open_page(url)
        assert opened.texts(".badge") == ["waiting for the run to start"]
        run.mkdir()
        with StateRecorder(run, "rl"):
            opened.wait_until(lambda: opened.texts(".badge") == ["running"], "the start")
            assert "No step is complete yet" in opened.page.locator("main").inner_text()
            assert opened.texts(".sentence") == ["A run of a model."]
            append_jsonl(run / "metrics.jsonl", [{**row, "timestamp": time.time()} for row in metric_rows(1)])
            opened.wait_until(lambda: ": 1 step." in opened.texts(".sentence")[0], "the first step")
        opened.wait_until(lambda: opened.texts(".badge") == ["finished"], "the end")


def test_a_slider_shows_the_same_prompt_over_time(report: str, run_dir: Path, open_page: Open) -> None:
    with serve_page(run_dir) as url:
        for address in (url, report):
            opened = open_page(f"{address}#prompts")
            page = opened.page
            page.wait_for_selector(".answer")
            assert opened.texts(".stepper span") == ["step 0", "step 5"]
            assert [text.split("\n")[0] for text in opened.texts(".answer .chip")] == ["1", "0.5"]
            page.focus("input[type=range]")
            page.keyboard.press("ArrowLeft")
            opened.wait_until(lambda opened=opened: opened.texts(".answer .chip") == ["0", "0"], "answers of step 0")
            assert "said 0 1" in page.locator(".answer").nth(1).inner_text()
            page.close()


def test_logs_are_shown_filtered_and_followed(run_dir: Path, open_page: Open) -> None:
    with serve_page(run_dir) as url, StateRecorder(run_dir, "rl"):
        opened = open_page(f"{url}#logs")
        page = opened.page
        opened.wait_until(lambda: len(opened.texts(".log li")) == 3, "the lines")
        assert "health check mask: <b>loss</b>" in opened.texts(".alerts li")[0]
        page.check("main input[type=checkbox]")
        opened.wait_until(lambda: len(opened.texts(".log li")) == 1, "warnings only")
        page.uncheck("main input[type=checkbox]")
        with (run_dir / "logs" / "trainer.log").open("a") as file:
            file.write("12:00:04    INFO Step 3\n")
        opened.wait_until(lambda: "Step 3" in "".join(opened.texts(".log li")), "a new line")
        page.close()  # before its server ends


def test_charts_are_downloaded_as_csv_and_png(report: str, open_page: Open) -> None:
    opened = open_page(f"{report}#curves")
    page = opened.page
    chart = page.locator(".chart").first
    chart.hover()

    def download(label: str) -> bytes:
        with page.expect_download() as found:
            chart.get_by_role("button", name=label).click()
        return Path(found.value.path()).read_bytes()

    lines = download("CSV").decode().splitlines()
    assert lines[0].split(",")[:2] == ["step", "reward/mean"] and lines[1] == "1,0.05"
    assert download("PNG").startswith(b"\x89PNG")


def test_each_rollout_has_an_address(run_dir: Path, open_page: Open) -> None:
    with serve_page(run_dir) as url:
        opened = open_page(f"{url}#rollouts")
        page = opened.page
        page.wait_for_selector(".detail .link")
        page.keyboard.press("j")
        opened.wait_until(lambda: "index=" in page.url, "an address that names the rollout")
        address, facts = page.url, opened.texts(".facts")[0]
        again = open_page(address)
        again.page.wait_for_selector(".detail .link")
        assert again.texts(".facts") == [facts]
        assert again.texts(".chosen-group")[0].startswith("group ")
        again.page.click(".chosen-group")
        again.wait_until(lambda: again.counter() == opened.counter(), "all rollouts again")


def test_health_checks_open_example_rollouts(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=9)
    failing = [{"step": step, "process": "orchestrator", "error/mean": 0.5} for step in range(1, 10)]
    append_jsonl(run / "metrics.jsonl", failing)
    write_report(open_run(run), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    [warned] = opened.texts(".checks .warning")
    assert "Errors" in warned and "50% of the rollouts fail" in warned
    opened.page.click(".checks .warning a")
    opened.wait_counter("9 of 108")
    assert opened.page.locator(".bubble.error").count() == 1


def test_commands_without_steps_do_not_wait_for_one(tmp_path: Path, open_page: Open) -> None:
    search, evaluation = write_context_search(tmp_path / "search"), tmp_path / "evaluation"
    with StateRecorder(search, "evolve"), serve_page(search) as url:
        opened = open_page(url)
        assert opened.texts(".badge")[0] == "running" and "17 contexts" in opened.texts(".sentence")[0]
        assert "No step is complete" not in " ".join(opened.texts(".lead"))
    with StateRecorder(evaluation, "eval"), serve_page(evaluation) as url:
        opened = open_page(url)
        assert opened.texts(".badge") == ["running"]
        assert "No step is complete" not in " ".join(opened.texts(".lead"))


def test_a_page_reloads_when_each_process_resumes(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=6)
    with serve_page(run) as url:
        page = open_page(url).page

        def resume_at(step: int, process: str) -> list[list[int]]:
            """Steps of the curves of orchestrator and trainer after the reload."""
            rows = [{**row, "attempt": 1} for row in metric_rows(step) if row["process"] == process]
            with page.expect_navigation():
                append_jsonl(run / "metrics.jsonl", rows)
            page.wait_for_selector(".sentence")
            names = ["reward/mean", "entropy/mean"]
            return list(
                page.evaluate("names => names.map((name) => curve(window.page.source.data, name).steps)", names)
            )

        assert resume_at(3, "orchestrator") == [[1, 2, 3], [1, 2, 3, 4, 5, 6]], "the trainer loads its model"
        assert resume_at(3, "trainer") == [[1, 2, 3], [1, 2, 3]]


def test_changes_during_a_reload_do_not_reload_again(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=6)
    with serve_page(run) as url:
        page = open_page(url).page
        documents: list[str] = []

        def answer_late(route: Any) -> None:
            documents.append(route.request.url)
            for step in range(4, 7):  # each is a change event
                append_jsonl(run / "metrics.jsonl", [{**row, "attempt": 1} for row in metric_rows(step)])
                page.wait_for_timeout(1000)
            route.continue_()

        page.route(url, answer_late)
        with page.expect_navigation():
            append_jsonl(run / "metrics.jsonl", [{**row, "attempt": 1} for row in metric_rows(3)])
        page.wait_for_selector(".sentence")
        assert documents == [url]


def test_the_validation_loss_is_beside_the_training_loss(tmp_path: Path, open_page: Open) -> None:
    run = tmp_path / "run"
    rows: list[dict[str, object]] = [{"step": step, "loss/mean": 3.0 / step} for step in range(1, 9)]
    rows += [{"step": step, "val_loss/mean": 3.5 - step / 8} for step in (0, 4, 8)]
    append_jsonl(run / "metrics.jsonl", [{**row, "timestamp": 1.0, "process": "sft"} for row in rows])
    write_report(open_run(run), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    assert opened.page.locator(".main-chart svg .line").count() == 2
    assert "val_loss/mean" in opened.texts(".main-chart")[0]
    opened.open_section("curves")
    assert opened.texts(".chart figcaption > b") == ["loss"], "one chart of both"


def test_durations_have_less_than_60_minutes(report: str, open_page: Open) -> None:
    seconds = [89, 5369, 5399, 7169, 7185, 3 * 3600 + 59.6 * 60]
    texts = ["89 s", "89 min", "1 h 30 min", "1 h 59 min", "2 h 0 min", "4 h 0 min"]
    assert open_page(report).page.evaluate("seconds => seconds.map(duration)", seconds) == texts
