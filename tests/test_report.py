"""The report: what it tells is true, and the page that tells it can be read anywhere."""

from __future__ import annotations

import collections
import dataclasses
import html
import itertools
import json
import re
import resource
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import autopar_torch as ap
from autopar_torch import api
from autopar_torch.report import page, text
from autopar_torch.report.blocks import split_block
from autopar_torch.report.gantt import COLOURS
from autopar_torch.report.perfetto import export
from autopar_torch.report.sections import axis_times, sections
from autopar_torch.report.story import Story, groups, runs
from autopar_torch.timeline import COMPUTE, Span, Timeline
from slow import slowly

CHROMIUM = shutil.which("chromium")
LIMITED = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
CLUSTERS = {"one node": "4xH100", "1,024 devices": "128x8xH100",
            "unequal": "2x2xH100 + 1x4xA100-80"}


class Loss(nn.Module):
    def __init__(self, size: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(size, size), nn.ReLU())
                                      for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@cache
def story_of(cluster: str, **limits: int) -> Story:
    with torch.device("meta"):
        model, inputs = Loss(4096), {"x": torch.zeros(2, 4096)}
    found = ap.plan(model, inputs, CLUSTERS[cluster], global_batch_size=4096, constraints=limits)
    return ap.report(None, found, model, inputs, CLUSTERS[cluster], global_batch_size=4096,
                     constraints=limits)


def split() -> Story:
    return story_of("one node", tp=2, pp=2)


def told(story: Story) -> str:
    return "\n".join(text.lines(story))


@pytest.mark.parametrize("cluster", ["unequal", *slowly("one node", "1,024 devices")])
def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(cluster: str) -> None:
    shown = page.page(story_of(cluster), "a plan")
    assert "<title>a plan</title>" in shown and "prefers-color-scheme: dark" in shown
    assert not re.search(r"<script|<link|<img|<iframe|https?:|@import|url\(|\son\w+=", shown)


def test_names_are_shown_as_text_not_taken_as_markup() -> None:
    story = split()
    plan = replace(story.plan, reason="<script>alert(1)</script>")
    shown = page.page(Story(plan, story.graph, story.num_rows), "<b>")
    assert "<script" not in shown and "&lt;script&gt;" in shown and "<b>" not in shown


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_each_rank_is_in_one_group_and_few_groups_are_drawn(cluster: str) -> None:
    story = story_of(cluster)
    assert story.predicted
    own = groups(story, story.predicted)
    ranks = [rank for group in own for rank in group.ranks]
    assert sorted(ranks) == list(range(story.num_devices)) and len(own) <= 32
    assert len(page.page(story, "")) < 2**21


def test_ranks_that_are_alike_have_the_same_spans_and_memory() -> None:
    story = story_of("1,024 devices")
    assert story.predicted
    for group in groups(story, story.predicted):
        last = [(s.name, s.stream, round(s.end_s, 6)) for s in story.predicted.of(group.ranks[-1])]
        assert last == [(s.name, s.stream, round(s.end_s, 6)) for s in group.spans]
        assert {story.predicted.memory[rank] for rank in group.ranks} == {group.memory}


def test_the_parts_of_a_rank_add_up_to_the_step_and_axes_to_its_exchange() -> None:
    story = split()
    assert story.predicted
    total = 0.0
    for group in groups(story, story.predicted):
        p = group.parts
        assert p.compute_s + (p.comm_s - p.overlap_s) + p.idle_s == pytest.approx(p.step_s)
        total += p.comm_s * len(group.ranks) / story.num_devices
    times = axis_times(story, story.predicted)
    assert sum(own for own, _ in times.values()) >= total > 0
    assert times["tensor groups"][0] and times["pipeline"][0] and not times["replicas"][0]


def test_every_cell_with_a_time_or_a_size_has_its_unit_and_is_in_both_forms() -> None:
    story = split()
    shown, as_text = page.page(story, ""), re.sub(r"\s+", " ", told(story))
    for section in sections(story):
        for row in section.table.rows if section.table else ():
            if section.name in ("step", "memory", "exchange"):
                assert any(re.search(r"\d (s|ms|us|MiB|GiB)\b", cell) for cell in row)
            assert all(cell in shown for cell in row if "&" not in cell and "<" not in cell)
        assert section.title in shown and section.title in as_text


def test_the_best_plan_says_why_the_others_lost() -> None:
    story = split()
    rows = next(s.table.rows for s in sections(story) if s.name == "candidates" and s.table)
    assert rows[0][2] == "this plan" and len(rows) > 1
    assert all(re.search(r"\d (s|ms|us) \w", row[4]) for row in rows)
    assert "proven fastest" in told(story)


def test_plans_on_unequal_devices_are_not_compared_part_by_part() -> None:
    rows = next(s.table.rows for s in sections(story_of("unequal"))
                if s.name == "candidates" and s.table)
    assert all("compared as a whole" in row[4] for row in rows)


def test_what_does_not_fit_is_said_not_to() -> None:
    with torch.device("meta"):
        model, inputs = Loss(4096), {"x": torch.zeros(2, 4096)}
    story = ap.report(None, ap.Plan.uniform(dp=4), model, inputs, "4xH100",
                      constraints={"memory_bytes": 2**28})
    assert "does NOT fit" in told(story) and story.found is None


def test_the_block_that_is_drawn_is_cut_as_the_plan_says() -> None:
    found = split_block(split())
    assert found and found.mesh == (2,)
    for param in found.params:
        held = sum(torch.Size(sizes).numel() for _, sizes in param.boxes)
        assert held == torch.Size(param.local).numel()
        assert (held < torch.Size(param.shape).numel()) == ("in 2" in param.layout)
    assert any("in 2" in param.layout for param in found.params)


def test_a_model_reports_a_measured_step_and_that_nothing_was_predicted(tmp_path: Path) -> None:
    model = ap.parallelize(Loss(), plan=ap.Plan.uniform())
    model.report(tmp_path / "report.html", x=torch.randn(4, 64))
    shown = (tmp_path / "report.html").read_text()
    assert "A real step took" in shown and "Nothing is predicted" in shown
    assert shown.count('class="compute"') == 1 and COLOURS["backward"] in shown
    with pytest.raises(ap.AutoparError, match="cannot write"):
        model.report(tmp_path / "report.html" / "below.html")


def test_a_measured_step_stands_beneath_the_predicted_one() -> None:
    story = split()
    assert story.predicted
    measured = Timeline(story.predicted.spans, 2 * story.predicted.step_s, source="measured")
    both = Story(story.plan, story.graph, story.num_rows, story.case, story.found,
                 story.predicted, measured)
    shown = page.page(both, "")
    assert shown.index("simulated: ") < shown.index("measured: ")
    assert "A real step took" in told(both) and "predicted are" in told(both)


def test_what_changed_while_training_is_told_after_which_step() -> None:
    story = split()
    seen = ((12, "rank 1 computes at 0.5 of what was usual"), (14, "moved in 0.20 s to tp 1"))
    shown = told(dataclasses.replace(story, changed=seen))
    assert "What changed while training" in shown and "What changed" not in told(story)
    assert re.search(r"^12 +rank 1 computes at 0.5", shown, re.M)


def test_of_many_ranks_that_differ_some_are_shown_and_how_many_is_said() -> None:
    spans = tuple(Span(rank, COMPUTE, "0F0", 0.0, 1.0 + rank) for rank in range(30))
    story = Story(ap.Plan.uniform(dp=30), split().graph, 30, measured=Timeline(spans, 30.0))
    shown = page.page(story, "")
    assert shown.count('class="lane"') == 24
    assert shown.count("Shown are 24 of 30 groups of ranks") == 2  # by the picture, by the table


def test_numbers_in_a_row_are_shortened() -> None:
    assert runs([0, 1, 2, 5, 7, 8, 10]) == "0-2, 5, 7-8, ..." and runs([3]) == "3"


def test_the_report_of_what_another_case_predicts_is_refused() -> None:
    with torch.device("meta"):
        model, inputs = Loss(4096), {"x": torch.zeros(2, 4096)}
    with pytest.raises(ap.AutoparError, match="names 8 devices"):
        api.report(None, ap.Plan.uniform(dp=8), model, inputs, "4xH100")


# --- in Perfetto ----------------------------------------------------------------------------------


def test_a_trace_keeps_the_rules_of_perfetto(tmp_path: Path) -> None:
    """Whose processor moves slices that overlap to other tracks, and drops arrows to nowhere."""
    with torch.device("meta"):
        model, inputs = Loss(4096), {"x": torch.zeros(2, 4096)}
    step = ap.simulate(ap.Plan.uniform(tp=2, pp=2, num_micro_batches=8), model, inputs,
                       "2x2xA100-80@roce100", global_batch_size=4096)
    export({"predicted": step, "measured": step}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in (e for e in events if e["ph"] == "X"):
        assert e["ts"] >= 0 and e["dur"] >= 0
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], round(e["ts"] + e["dur"], 3)))
    for own in tracks.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(own)))
    assert len(tracks) > 2 * len({pid for pid, _ in tracks})  # some exchanges are at the same time
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(tracks)
    ends = [e for e in events if e["ph"] in "sf"]
    assert ends and all(any(a <= e["ts"] <= b for a, b in tracks[e["pid"], e["tid"]]) for e in ends)
    by_id = collections.Counter((e["id"], e["ph"]) for e in ends)
    assert set(by_id.values()) == {1} and len({number for number, _ in by_id}) * 2 == len(by_id)


# --- in a browser ---------------------------------------------------------------------------------

# Whether anything is cut or lies on something else; the answer is the title of the page.
LOOK = """<script>
const all = [...document.querySelectorAll("h1,h2,p,figcaption,th,td,.ticks span,.lane svg")]
  .map(e => [e, e.getBoundingClientRect()]).filter(([e, r]) => r.width && r.height);
const wide = document.documentElement.getBoundingClientRect().width;
const cut = all.filter(([e, r]) => r.left < -1 || r.right > wide + 1
  || e.scrollWidth > e.clientWidth + 1 && e.clientWidth && e.tagName != "svg");
let over = [];
for (const [a, r] of all) for (const [b, s] of all)
  if (a !== b && !a.contains(b) && !b.contains(a) && r.left < s.right - 1 && s.left < r.right - 1
      && r.top < s.bottom - 1 && s.top < r.bottom - 1)
    over.push(a.textContent + "/" + b.textContent);
document.title = JSON.stringify({wide, cut: cut.map(([e]) => e.textContent).slice(0, 5),
  over: over.slice(0, 5), ink: getComputedStyle(document.body).color,
  paper: getComputedStyle(document.body).backgroundColor});
</script>"""


def looked_at(story: Story, folder: Path, width: int, dark: bool) -> dict[str, object]:
    """What a browser makes of a page; a window is never narrower than 500, so the page is."""
    shown = page.page(story, "a plan").replace("</body>", LOOK + "</body>").replace(
        "<style>", f"<style>html {{ width: {width}px; }}")
    (folder / "page.html").write_text(shown)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", f"--user-data-dir={folder / 'user'}", f"--window-size={width},1000",
        f"--blink-settings=preferredColorScheme={int(not dark)}", "--hide-scrollbars",
        "--dump-dom", f"file://{folder / 'page.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    found: dict[str, object] = json.loads(html.unescape(title[1]))
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.skipif(LIMITED, reason="Chromium hangs where its address space is limited")
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("cluster", [*CLUSTERS, "split"])
def test_in_a_browser_nothing_is_cut_and_nothing_overlaps(
    cluster: str, width: int, tmp_path: Path
) -> None:
    story = split() if cluster == "split" else story_of(cluster)
    found = looked_at(story, tmp_path, width, dark=width == 400)
    assert found["wide"] == width and not found["cut"] and not found["over"]
    paper = "rgb(22, 22, 22)" if width == 400 else "rgb(255, 255, 255)"
    assert found["paper"] == paper and found["ink"] != paper
