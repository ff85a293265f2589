"""From run directories to the files of a report."""

from collections.abc import Sequence
from pathlib import Path

from olmo_hf.errors import DataError
from olmo_hf.report.history import load_history
from olmo_hf.report.html import render_page
from olmo_hf.report.png import draw_charts, draw_overview
from olmo_hf.report.spikes import describe_spikes


def write_report(
    run_dirs: Sequence[Path], output_dir: Path | None = None, *, explain: bool = False
) -> tuple[Path, Path, Path]:
    """Writes `report.html`, `loss.png` and `charts.png`; works on runs that are going on or were killed.

    Args:
        run_dirs: one run, or several to compare.
        output_dir: where to write. None: into the first run's directory.
        explain: compute the loss of every instance of a spike with the checkpoint before it.

    Returns:
        The three paths.

    Raises:
        DataError: a directory holds no run, the same run is named twice, or the output cannot be written.
    """
    runs = [load_history(run_dir.resolve()) for run_dir in run_dirs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise DataError(
            f"Two of the runs have the same name ({', '.join(names)}); rename a directory to tell them apart."
        )
    spikes = {run.name: describe_spikes(run, explain=explain) for run in runs}
    target = run_dirs[0] if output_dir is None else output_dir
    html_path, png_path, charts_path = (target / name for name in ("report.html", "loss.png", "charts.png"))
    try:
        target.mkdir(parents=True, exist_ok=True)
        html_path.write_text(render_page(runs, spikes), encoding="utf-8")
        draw_overview(runs, png_path)
        draw_charts(runs, charts_path)
    except OSError as error:
        raise DataError(
            f"The report cannot be written into {target} ({error}); choose another --output-dir."
        ) from error
    return html_path, png_path, charts_path
