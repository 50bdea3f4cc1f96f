"""The page in a real browser: report, live server, filters, rollouts, keyboard, hostile texts, a running run."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_browser import Open, serve_page, start_page
from page_runs import (
    HOSTILE,
    metric_rows,
    sample_rows,
    search_row,
    write_context_search,
    write_distillation_run,
    write_evaluation,
    write_page_run,
)

from prime_rl.monitor.local_runs import open_run
from prime_rl.monitor.report import write_report
from prime_rl.runtime.run_state import StateRecorder
from rollouts.training.metrics import append_jsonl

pytestmark = pytest.mark.timeout(400)

PROCESSES = "() => Object.keys(window.page.source.data.series.curves)"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def report(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(open_run(run_dir), path)
    return path.as_uri()


def test_report_opens_without_network_and_shows_the_run(report: str, open_page: Open) -> None:
    opened = open_page(report)
    assert [url for url in opened.asked if not url.startswith(("file:", "blob:", "data:"))] == []
    [sentence] = opened.texts(".sentence")
    assert (
        "tiny" in sentence and "12 of 12 steps" in sentence and "144 rollouts" in sentence and "rose from" in sentence
    )
    assert {"Reward", "Loss", "Entropy", "Mismatch KL"} <= {text.split("\n")[0] for text in opened.texts(".tile")}
    assert "0.75 ± 0.02" in opened.texts(".panel table")[0]
    assert "the trainer waits for batches" in " ".join(opened.texts(".findings")).lower()

    opened.open_section("curves")
    titles = opened.texts(".chart figcaption > b")
    assert {"reward/mean", "loss/mean", "entropy/mean", "mismatch_kl/mean", "perf/throughput"} <= set(titles)
    plot = opened.page.locator(".chart svg").first
    plot.hover()
    assert re.match(r"step \d+", opened.page.locator("#tip").inner_text())
    plot.click()
    opened.page.wait_for_selector(".browser")
    assert re.fullmatch(r"12 of 144 rollouts", opened.counter()), "a click on a curve leads to the rollouts of its step"

    opened.open_section("timeline")
    assert opened.page.locator("canvas.lanes").bounding_box()["height"] > 90
    assert "waits for rollouts" in opened.texts(".shares")[0]
    opened.open_section("config")
    opened.page.locator("main input[type=checkbox]").check()
    keys = [row.split("\t")[0] for row in opened.texts(".settings tbody tr")]
    assert keys == ["max_steps", "model.name", "model.note"]


def test_rollouts_are_filtered_and_read(report: str, open_page: Open) -> None:
    opened = open_page(report)
    page = opened.page
    opened.open_section("rollouts")
    opened.wait_counter("144 rollouts")
    page.locator(".list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    opened.wait_until(lambda: page.locator(".list li").count() > 40, "further rollouts after scrolling")
    page.keyboard.press("/")
    page.keyboard.type("QUESTION 7")
    opened.wait_counter("11 of 144")
    page.keyboard.press("Escape")
    words = page.locator(".filters input[type=search]").input_value()
    assert words == "QUESTION 7", "leaving the field keeps its words"
    page.select_option("select[aria-label=environment]", "beta")
    opened.wait_counter("4 of 144")
    page.select_option("select[aria-label=sort]", "reward up")
    opened.wait_until(lambda: opened.rewards() == sorted(opened.rewards()), "four rows by reward")
    rewards = opened.rewards()
    assert len(rewards) == 4 and rewards == sorted(rewards)
    page.fill("input[aria-label='reward ≥']", str(rewards[2]))
    opened.wait_counter("2 of 144")
    assert float(opened.texts(".facts .chip")[0]) == rewards[2]

    assert "look_up" in opened.texts(".call")[0] and "word" in opened.texts(".call th")[0]
    assert page.locator(".bubble.assistant details.aside summary").inner_text().startswith("reasoning")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    second = opened.rewards()[1]
    opened.wait_until(lambda: float(opened.texts(".facts .chip")[0]) == second, "j opens the next one")

    page.keyboard.press("t")
    page.wait_for_selector(".tokens .token")
    assert page.locator(".token.context").count() == 8
    descriptions = {
        "advantage": "How much",
        "logprob": "Log-prob",
        "teacher": "Blue",
        "trainer": "Diff",
        "version": "Policy version",
    }
    for coloring, begins in descriptions.items():
        page.select_option("select[aria-label='color by']", coloring)
        opened.wait_until(lambda begins=begins: opened.texts(".colors p")[0].startswith(begins), coloring)
        assert page.locator(".token:not(.context)[style*=background]").count() > 5, coloring
    page.locator(".token:not(.context)").first.hover()
    tip = page.locator("#tip").inner_text()
    assert all(word in tip for word in ("probability", "advantage", "teacher − student", "trainer − engine", "id "))
    page.keyboard.press("g")
    page.wait_for_selector(".cards .card")
    assert page.locator(".card").count() == 4 and page.locator(".card.chosen").count() == 1


def test_what_models_write_is_shown_and_never_run(report: str, open_page: Open) -> None:
    opened = open_page(report + "#rollouts")
    page = opened.page
    page.fill(".filters input[type=search]", "onerror")
    opened.wait_counter("12 of 144")
    page.wait_for_selector(".bubble.error")
    shown = page.locator(".bubble.assistant pre").evaluate("node => node.textContent")
    assert shown == HOSTILE
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.wait_for_selector(".cards .card")
    opened.open_section("config")
    page.wait_for_selector(".settings")
    assert "<b>not bold</b>" in opened.texts(".settings")[0]
    assert page.evaluate("window.hacked") is None
    assert page.locator("main b:text-is('bold'), main img, main script").count() == 0
    # Even markup that got into the page could not run: only the script of the page may.
    page.evaluate(
        "document.body.append(document.createRange().createContextualFragment('<script>window.hacked = 3</script>'))"
    )
    assert page.evaluate("window.hacked") is None
    opened.wrong[:] = [text for text in opened.wrong if "Content Security Policy" not in text]


def test_light_and_dark_keep_their_contrast(report: str, open_page: Open) -> None:
    opened = open_page(report)
    contrast = """() => {
      const pen = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = name => {
        pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
        pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      };
      const ratio = (a, b) => Math.max(light(a) / light(b), light(b) / light(a));
      const grounds = ['--panel', '--ground'];
      return [...grounds.flatMap(g => [ratio('--ink', g), ratio('--faint', g)]), ratio('--accent', '--soft')];
    }"""
    for theme in ("light", "dark"):
        assert opened.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == theme
        assert min(opened.page.evaluate(contrast)) >= 4.5, theme
        opened.page.keyboard.press("d")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run, and the address at which the real command shows it."""
    run = write_page_run(tmp_path / "run", num_steps=3)
    with serve_page(run) as url:
        yield run, url


def test_the_live_page_follows_a_run(served: tuple[Path, str], open_page: Open) -> None:
    run, url = served
    opened = open_page(url)
    page = opened.page
    page.wait_for_selector(".badge:not(.lost)")
    opened.open_section("rollouts")
    opened.wait_counter("36 rollouts")
    chosen = page.locator(".list li.chosen").text_content()  # innerText is empty before it is painted
    rng = random.Random(5)
    append_jsonl(run / "samples.jsonl", sample_rows(rng, 4))
    append_jsonl(run / "metrics.jsonl", metric_rows(4))
    opened.wait_counter("48 rollouts")
    assert page.locator(".list li.chosen").text_content() == chosen, "what somebody reads stays open"
    opened.open_section("curves")
    page.locator(".chart svg").first.hover(position={"x": 350, "y": 60})
    opened.wait_until(lambda: page.locator("#tip").inner_text().startswith("step 4"), "the curve has grown")
    last = "() => window.page.source.data.series.steps.at(-1).at(-1)"
    for step in (5, 6):
        append_jsonl(run / "metrics.jsonl", metric_rows(step))
        opened.wait_until(lambda step=step: page.evaluate(last) == step, f"step {step}")
    opened.open_section("rollouts")
    assert page.locator("select[aria-label=kind]").is_hidden(), "there are no other rollouts yet"
    page.locator(".filters input[type=search]").press_sequentially("said 6")
    opened.wait_counter("0 of 48")
    write_evaluation(run, 6, [1.0, 0.5, None, 0.0])
    opened.wait_until(lambda: page.locator("select[aria-label=kind]").is_visible(), "rollouts of an evaluation")
    page.locator(".filters input[type=search]").press_sequentially(" 1")
    assert page.locator(".filters input[type=search]").input_value() == "said 6 1", "typing goes on through a change"
    page.select_option("select[aria-label=kind]", "evaluation")
    opened.wait_counter("1 of 4")
    texts = ".comparison h4"
    opened.wait_until(lambda: "expected answer" in "".join(opened.texts(texts)[:1]), "the conversation")
    page.keyboard.press("Escape")
    opened.open_section("overview")
    page.click(".panel td a >> text=alpha")
    opened.wait_counter("4 rollouts")
    assert page.evaluate("window.hacked") is None
    opened.open_section("overview")
    opened.wait_until(lambda: "6 of 3 steps" in "".join(opened.texts(".sentence")[:1]), "the first tab")
    assert all(requested.startswith((url, "blob:")) for requested in opened.asked)


def test_changes_keep_zoom_and_search(served: tuple[Path, str], open_page: Open) -> None:
    run, url = served
    opened = open_page(url)
    page = opened.page

    def add_step(step: int) -> None:
        append_jsonl(run / "metrics.jsonl", metric_rows(step))
        last = "() => window.page.source.data.series.steps.at(-1).at(-1)"
        opened.wait_until(lambda: page.evaluate(last) == step, f"step {step}")

    def find_zoom() -> float:
        return page.evaluate("() => window.page.kept.zoom.to - window.page.kept.zoom.from")

    opened.open_section("timeline")
    page.click("text=zoom in")
    shown = find_zoom()
    add_step(4)
    page.click("text=zoom in")
    assert find_zoom() == pytest.approx(shown / 2)
    page.click("text=whole run")
    assert page.evaluate("() => window.page.kept.zoom") is None
    opened.open_section("curves")
    page.locator("main input[type=search]").fill("entropy")
    opened.wait_until(lambda: page.evaluate("() => window.page.kept.search") == "entropy", "the search")
    page.keyboard.press("Escape")
    add_step(5)
    assert page.locator("main input[type=search]").input_value() == "entropy"
    assert opened.texts("main > .charts:last-child figcaption > b") == ["entropy/mean"]


def test_the_live_page_reads_rollouts_as_the_report_does(served: tuple[Path, str], open_page: Open) -> None:
    run, url = served
    opened = open_page(url + "#rollouts")
    page = opened.page
    opened.wait_counter("36 rollouts")
    page.fill(".filters input[type=search]", "question 2 2")
    opened.wait_counter("4 of 36")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.wait_for_selector(".cards .card")
    assert page.locator(".card").count() == 4
    page.keyboard.press("t")
    page.wait_for_selector(".token.context")
    live = page.locator(".tokens").inner_text()
    path = run.parent / "report.html"
    write_report(open_run(run), path)
    again = open_page(path.as_uri() + "#rollouts")
    again.page.fill(".filters input[type=search]", "question 2 2")
    again.wait_counter("4 of 36")
    again.page.keyboard.press("Escape")
    again.page.keyboard.press("t")
    again.page.wait_for_selector(".token.context")
    assert again.page.locator(".tokens").inner_text() == live


def test_page_of_a_distillation_shows_the_teacher(tmp_path: Path, open_page: Open) -> None:
    run = write_distillation_run(tmp_path / "run")
    write_report(open_run(run), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    page = opened.page
    [sentence] = opened.texts(".sentence")
    assert sentence.startswith("Context distillation of tiny") and "The teacher KL fell from" in sentence
    assert (
        "Gap closed on facts: 0.80 (0.60 to 1.10), at step 12." in sentence and "Retention of other: 0.7." in sentence
    )
    tiles = [text.split("\n")[0] for text in opened.texts(".tile")]
    assert tiles[:4] == ["Teacher KL", "Gap closed, facts", "Retention, other", "Reference KL"]
    overview = page.locator("main").inner_text()
    assert "reward" not in overview.lower().replace("mean rewards;", "") and "groups" not in overview
    assert opened.texts(".scores tbody tr")[1].split() == "facts 12 0.5 0.6 0.6 0.80 (0.60 to 1.10) – 0.05".split()
    opened.open_section("curves")
    opened.wait_until(lambda: opened.texts("main h2")[0] == "Student and teacher", "the curves")
    titles = opened.texts(".chart figcaption > b")
    assert {"teacher_kl/mean", "distill/facts/gap_closed", "distill/other/retention"} <= set(titles)
    assert not any(title.startswith(("reward", "batch/solve")) for title in titles)
    opened.open_section("rollouts")
    opened.wait_until(lambda: page.locator(".list li").count() > 10, "the rollouts")
    assert page.locator(".list .chip").count() == 0, "no rewards where none are computed"
    unscored = page.locator(".list li:has(.unscored)")
    assert "no teacher score" in unscored.first.text_content() and unscored.count() >= 3
    unscored.first.click()
    opened.wait_until(lambda: "no score" in opened.texts(".facts")[0], "the fact in the head")
    page.locator(".list li:not(:has(.unscored))").first.click()
    page.keyboard.press("t")
    page.wait_for_selector(".token.context")
    assert page.locator("select[aria-label='color by']").input_value() == "teacher"
    page.keyboard.press("g")
    page.wait_for_selector(".cards .card")
    assert "toward the teacher's probabilities" in opened.texts(".body .lead")[0]


def test_evaluations_are_drawn_on_the_reward_curve(tmp_path: Path, open_page: Open) -> None:
    write_page_run(tmp_path / "run", num_steps=12)
    scores = [{"step": step, "process": "orchestrator", "eval/alpha/avg@1": 0.1 + step / 50} for step in (0, 6, 12)]
    append_jsonl(tmp_path / "run" / "metrics.jsonl", scores)
    write_report(open_run(tmp_path / "run"), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    opened.open_section("curves")
    first = opened.page.locator(".chart").first
    opened.wait_until(lambda: "alpha held out, avg@1" in first.locator(".legend").inner_text(), "the chart")
    assert first.locator("svg .line").count() == 2 and first.locator("svg .points circle").count() == 3


def test_missing_rewards_are_last_and_pass_no_filter(tmp_path: Path, open_page: Open) -> None:
    append_jsonl(tmp_path / "run" / "metrics.jsonl", metric_rows(1))
    write_evaluation(tmp_path / "run", 1, [0.5, None, 1.0, 0.25])
    write_report(open_run(tmp_path / "run"), tmp_path / "report.html")
    page = open_page((tmp_path / "report.html").as_uri() + "#rollouts").page
    conditions = dict.fromkeys(("kind", "step", "env", "status", "min", "max", "group", "index", "equal"))

    def select(**chosen: object) -> list[float | None]:
        query = {**conditions, "text": "", "sort": "reward", "descending": True, **chosen}
        rows = page.evaluate("async (query) => (await window.page.source.select(query, 0, 9)).rows", query)
        return [row["reward"] for row in rows]

    assert select() == [1.0, 0.5, 0.25, None] and select(descending=False) == [0.25, 0.5, 1.0, None]
    assert select(max=0.5) == [0.5, 0.25] and select(min=0) == [1.0, 0.5, 0.25]


def test_contexts_of_a_running_search_are_added(tmp_path: Path, open_page: Open) -> None:
    run = tmp_path / "run"
    write_context_search(run)
    with serve_page(run) as url:
        opened = open_page(url)
        assert len(opened.texts(".contexts li")) == 17
        append_jsonl(run / "evolve" / "candidates.jsonl", [search_row(17, 0, "accepted", 0.9, "b is 2", "+b is 2")])
        row = {"step": 17, "timestamp": 1017.0, "process": "evolve", "evolve/best": 0.9}
        append_jsonl(run / "metrics.jsonl", [row])
        opened.wait_until(lambda: len(opened.texts(".contexts li")) == 18, "the new context")


def test_expected_answer_is_beside_the_completion(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=1)
    texts = {"completion": "<answer>the red cat</answer>", "answer": "the rod cat", "info": {"level": 2}}
    row = {**sample_rows(random.Random(0), 2)[1], **texts, "tokens": [], "loss_mask": [], "logprobs": []}
    append_jsonl(run / "samples.jsonl", [row, {**row, "index": 2, "answer": "cat", "completion": "It is a cat. " * 9}])
    write_report(open_run(run), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    page = opened.page
    opened.open_section("rollouts")
    page.locator(".list li", has_text="the red cat").click()
    assert opened.texts(".comparison pre") == ["the rod cat", "<answer>the red cat</answer>"]
    assert opened.texts("mark.missing") == ["o"] and opened.texts("mark.same") == ["the r", "d cat"]
    assert '"level": 2' in page.locator("details.aside pre").text_content()
    page.locator(".list li", has_text="It is a cat").click()
    assert opened.texts(".comparison h4")[0] == "expected answer contained in the completion"
    assert opened.texts("mark.missing") == [] and opened.texts("mark.same") == ["cat"]
    page.keyboard.press("g")
    assert "expected answer" in " ".join(opened.texts(".body summary"))


def test_few_noisy_steps_are_no_trend(tmp_path: Path, open_page: Open) -> None:
    write_report(open_run(write_page_run(tmp_path / "run", num_steps=3)), tmp_path / "report.html")
    opened = open_page((tmp_path / "report.html").as_uri())
    [sentence] = opened.texts(".sentence")
    assert "3 of 3 steps" in sentence and not re.search("rose|fell|stayed|noise", sentence)
    assert opened.page.locator(".advice").count() == 0


def test_killed_run_and_lost_server_are_shown(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    record = "import sys; from pathlib import Path; from prime_rl.runtime.run_state import StateRecorder\n"
    record += "with StateRecorder(Path(sys.argv[1]), 'rl'): print('ready', flush=True); input()"
    command = [sys.executable, "-c", record, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as recorder:
        assert recorder.stdout is not None and recorder.stdout.readline() == b"ready\n"
        with start_page(run) as (url, _):
            opened = open_page(url)
            page = opened.page
            assert opened.texts(".badge") == ["running"] and page.locator(".lost-bar").is_hidden()
            page.wait_for_selector(".badge:not(.lost)")
            recorder.kill()
            killed = "stopped at step 3 (killed)"
            opened.wait_until(lambda: opened.texts(".badge") == [killed], "the end of the run")
            assert "Stopped at step 3 (killed)." in opened.texts(".sentence")[0]
        opened.wait_until(lambda: page.locator(".lost-bar").is_visible(), "the lost connection")
        assert page.locator(".lost-bar").inner_text().startswith("This page is no longer served; the run has ended.")
        assert opened.texts(".badge") == [killed], "a run that has ended stays so"
    opened.wrong[:] = [text for text in opened.wrong if "ERR_" not in text]


def test_lost_server_of_a_running_run_is_a_state(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    with StateRecorder(run, "rl"):
        with start_page(run) as (url, _):
            opened = open_page(url)
            page = opened.page
            assert opened.texts(".badge") == ["running"]
        opened.wait_until(lambda: page.locator(".lost-bar").is_visible(), "the lost connection")
        assert opened.texts(".badge") == ["no connection, was running"]
        age = re.compile(r"Connection to the server lost\. Last update (\d+) s ago\.")
        first = age.fullmatch(page.locator(".lost-bar").inner_text())
        assert first is not None
        opened.wait_until(lambda: page.locator(".lost-bar").inner_text() != first[0], "a growing age")
    opened.wrong[:] = [text for text in opened.wrong if "ERR_" not in text]


@pytest.mark.slow
def test_a_server_that_hangs_counts_as_lost_until_it_answers(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    with StateRecorder(run, "rl"), start_page(run) as (url, server):
        opened = open_page(url)
        page = opened.page
        server.send_signal(signal.SIGSTOP)
        opened.wait_until(lambda: page.locator(".lost-bar").is_visible(), "missing signs of life")
        server.send_signal(signal.SIGCONT)
        opened.wait_until(lambda: page.locator(".lost-bar").is_hidden(), "the connection")
        assert opened.texts(".badge") == ["running"]


def test_times_of_a_running_run_advance(tmp_path: Path, open_page: Open) -> None:
    run = write_page_run(tmp_path / "run", num_steps=3)
    (run / "metrics.jsonl").unlink()
    start = time.time() - 300
    rows = [{"step": step, "process": "trainer", "timestamp": start + 60 * step, "loss/mean": 1.0} for step in (1, 2)]
    append_jsonl(run / "metrics.jsonl", rows)
    with StateRecorder(run, "rl"), serve_page(run) as url:
        opened = open_page(url)
        times = "4 min of training · the last step is due"
        opened.wait_until(lambda: opened.texts(".progress .times") == [times], "minutes since the first step")
        later = {"step": 2, "process": "eval", "timestamp": time.time() + 9000, "eval/alpha/avg@1": 0.5}
        append_jsonl(run / "metrics.jsonl", [later])
        opened.wait_until(lambda: "eval" in opened.page.evaluate(PROCESSES), "the evaluation")
        assert opened.texts(".progress .times") == [times], "a later evaluation does not count"
