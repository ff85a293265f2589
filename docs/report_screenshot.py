"""The picture of `olmo-hf report` in the guide: a small run with spikes, drawn by a browser without a screen.

python docs/report_screenshot.py [RUN] [-o docs/images/report.png]

Without RUN it trains one of three hundred steps on data that were poisoned at two places, and stops it on the way.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from olmo_hf.report.write import write_report  # noqa: E402

POISON = (150, 230)


def train_example(directory: Path) -> Path:
    """A run that spiked, went back and was stopped and continued; returns its directory."""
    from tests import runs
    from tests.poisoned import write_poisoned_run

    settings = {"save_interval": 50, "learning_rate": 0.003}
    config = write_poisoned_run(directory, POISON, max_rollbacks=1, steps=300, instances=3000, **settings)
    words = ["--callbacks.loss_spike.window_steps=64", "--callbacks.loss_spike.threshold=12", "--name=spiky"]
    runs.run(config, *words, "--training.stop_at=100")
    runs.run(config, *words, "--training.weight_decay=0.05")
    return (directory / "run").rename(directory / "spiky run")


def take_picture(page: Path, picture: Path, directory: Path) -> None:
    """Opens the page in Chromium and saves what it shows."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs Chromium (apt-get install chromium)")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    command += [f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=5000", "--window-size=1300,1500"]
    subprocess.run([*command, f"--screenshot={picture.resolve()}", page.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Trains if need be, reports, takes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="run directory (default: one is trained)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images" / "report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = options.run if options.run is not None else train_example(directory / "spiky")
        page, *_ = write_report([run], directory / "report", explain=True)
        take_picture(page, options.output, directory)
    print(options.output)


if __name__ == "__main__":
    main()
