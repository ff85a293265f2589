"""The page in a real browser: drawn without an error, answers the pointer, zooms."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from olmo_hf.report.history import load_history
from olmo_hf.report.html import render_page
from tests.report.fake_run import make_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)")

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,900",
    "--virtual-time-budget=5000",
]

BEFORE = """<script>
window.problems = [];
window.onerror = (message, source, line) => { window.problems.push(message + " at line " + line); };
const consoleError = console.error;
console.error = (...words) => { window.problems.push(words.join(" ")); };
</script>"""

AFTER = """<script>
(() => {
  const canvas = document.querySelector(".chart canvas"), box = canvas.getBoundingClientRect();
  const point = (name, share) => canvas.dispatchEvent(new PointerEvent(name, {
    clientX: box.left + 58 + share * (box.width - 68), clientY: box.top + 100, bubbles: true }));
  const ink = element => {
    const pixels = element.getContext("2d").getImageData(0, 0, element.width, element.height).data;
    let count = 0;
    for (let i = 3; i < pixels.length; i += 4) if (pixels[i] > 100) count++;
    return count;
  };
  const said = { ink: [...document.querySelectorAll("canvas")].map(ink) };
  said.whole = range();
  point("pointermove", 0.5);
  said.tip = tip.hidden ? "" : tip.innerText;
  point("pointerleave", 0.5);
  said.hidden = tip.hidden;
  point("pointerdown", 0.25); point("pointermove", 0.5); point("pointerup", 0.5);
  said.zoomed = range();
  document.querySelector("[value=tokens]").click();
  said.tokens = range();
  document.querySelector("[value=hours]").click();
  document.querySelector(".log input").click();
  for (const button of document.querySelectorAll(".legend button, #runs button")) { button.click(); button.click(); }
  document.getElementById("smoothing").value = 0;
  document.getElementById("smoothing").dispatchEvent(new Event("input"));
  canvas.dispatchEvent(new MouseEvent("dblclick"));
  said.charts = [...document.querySelectorAll(".chart h3")].map(title => title.textContent);
  said.tiles = document.getElementById("tiles").innerText;
  said.tables = document.querySelectorAll("section table tr").length;
  said.spikes = [...document.querySelectorAll("#spikes summary, #spikes pre")].map(one => one.textContent);
  said.problems = window.problems;
  const out = document.createElement("pre");
  out.id = "said";
  out.textContent = JSON.stringify(said);
  document.body.append(out);
})();
</script>"""


def ask(page: str, directory: Path) -> dict:
    """Opens the page, plays with it, and returns what it said."""
    path = directory / "page.html"
    path.write_text(page.replace("<body>", "<body>" + BEFORE).replace("</body>", AFTER + "</body>"))
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={directory / 'profile'}", "--dump-dom", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    return json.loads(found.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def test_one_run(run_dir: Path, tmp_path: Path) -> None:
    one = {"step": 150, "title": "step 150: loss 4", "instances": [], "settings": "training: {}\n", "note": "no text"}
    said = ask(render_page([load_history(run_dir)], {"a-run": [one, {**one, "settings": ""}]}), tmp_path)
    assert said["problems"] == []
    titles = ["step 150: loss 4 look", "settings in force", "training: {}\n", "step 150: loss 4 look"]
    assert said["spikes"] == titles, "without settings there is nothing to open"
    assert said["charts"][:2] == ["Loss", "Held-out perplexity"]
    assert all(count > 500 for count in said["ink"]), said["ink"]
    assert said["whole"] == [1, 200]
    assert "step 101" in said["tip"] or "step 100" in said["tip"]
    assert "training" in said["tip"]
    assert "c4" in said["tip"]
    assert said["hidden"] is True
    assert said["zoomed"] == pytest.approx([1 + 199 / 4, 1 + 199 / 2], abs=0.5)
    assert said["tokens"] == pytest.approx([2048, 200 * 2048])
    assert "200 / 200" in said["tiles"]
    assert said["tables"] >= 3


def test_two_runs(run_dir: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=3)
    said = ask(render_page([load_history(run_dir), load_history(other)]), tmp_path)
    assert said["problems"] == []
    assert "a-run · training" in said["tip"]
    assert "other · c4" in said["tip"]
