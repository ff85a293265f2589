"""`make promises`: real commands on a real clone, and a page that says what became of each."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from benchmarks import promises
from benchmarks.measuring.figures import all_pass, largest
from benchmarks.measuring.promised import PROMISES, Measure, Promise

ROOT = Path(__file__).parents[2]


def printing(name: str, text: str, **further: str) -> Measure:
    return Measure(name, "what it is", ("-c", f"print({text!r})"), **further)


PROMISED = (
    Promise(
        "1. Numbers",
        "They are small.",
        (
            Measure("small", "a|b", ("-c", "print('off 1e-7')"), largest(r"off (.*)", 1e-6, what="off")),
            printing("kept", "2 passed, 1 skipped in 1.0s"),
        ),
    ),
    Promise("2. Others", "They too.", (printing("broken", "1 failed in 1.0s"), printing("card", "", needs="a GPU"))),
)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one file, with a change that is not committed."""
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "generate.py").write_text("from pathlib import Path\nPath('generated').touch()\n")
    (root / "who.txt").write_text("committed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(root)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    (root / "who.txt").write_text("changed")
    monkeypatch.setattr(promises, "ROOT", root)
    monkeypatch.setattr(promises, "PAGE", root / "docs" / "promises.md")
    monkeypatch.setattr(promises, "ELSEWHERE", root / "build" / "promises.md")
    monkeypatch.setattr(promises, "PROMISES", PROMISED)
    monkeypatch.setattr(promises, "has_gpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    return root


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["promises", *map(str, words)])
    return promises.main()


def test_a_page_of_what_held_what_did_not_and_what_was_not_tried(repository, monkeypatch, tmp_path):
    assert run(monkeypatch) == 1
    page = (repository / "docs" / "promises.md").read_text()
    assert "Result: 2 of 4 measurements hold; not met: broken; not measured: card.\n" in page
    for words in (
        "- machine: ",
        "- versions: Python 3",
        "- commit: ",
        "- date: 20",
        "## 1. Numbers",
        "They are small.",
    ):
        assert words in page
    assert "| a\\|b (`small`) | `python -c print('off 1e-7')` | off 1.0e-07 | 1e-06 at most | met |" in page
    assert "| 2 passed, 1 skipped | all pass | met |" in page
    assert "| 1 failed | all pass | NOT MET |" in page
    assert "| needs a GPU, and there is none here | all pass | not measured |" in page
    assert (tmp_path / "generated").exists(), "what repeats the page is written anew"


def test_some_of_the_rows_leave_the_page_of_the_guide_alone(repository, monkeypatch, capsys):
    assert run(monkeypatch, "--only", "kept") == 0
    assert not (repository / "docs" / "promises.md").exists()
    page = (repository / "build" / "promises.md").read_text()
    assert "Result: 1 of 4 measurements hold; none that was made fails; not measured: small, broken, card.\n" in page
    assert page.count("not asked for in this run") == 2
    assert "kept: met: 2 passed, 1 skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(monkeypatch, "--only", "kep")
    assert "no such row: kep; there are small, kept, broken, card" in capsys.readouterr().err


def test_what_is_tried_is_the_last_commit_and_its_modules_win(repository, monkeypatch):
    words = ("-c", "import os; print(open('who.txt').read(), os.environ['PYTHONPATH'], os.getcwd())")
    seen = {}

    def remember(output, status):
        seen["words"] = output.split()
        return all_pass("1 passed in 1s", status)

    monkeypatch.setattr(promises, "PROMISES", (Promise("1.", "", (Measure("look", "", words, remember),)),))
    assert run(monkeypatch) == 0
    content, path, directory = seen["words"]
    assert content == "committed"
    assert path == directory != str(repository)


def test_a_command_that_does_not_end_is_a_promise_not_kept(repository, monkeypatch):
    slow = Measure("slow", "", ("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(promises, "PROMISES", (Promise("1.", "", (slow,)),))
    monkeypatch.setattr(promises, "LIMIT_SECONDS", 0.5)
    assert run(monkeypatch) == 1
    assert "| not done after 0 s | an end | NOT MET |" in (repository / "docs" / "promises.md").read_text()


def test_an_interrupted_run_keeps_what_it_has(repository, monkeypatch):
    press = Measure(
        "press", "", ("-c", "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)")
    )
    rows = (printing("before", "1 passed in 1s"), press, printing("after", "1 passed in 1s"))
    monkeypatch.setattr(promises, "PROMISES", (Promise("1.", "", rows),))
    assert run(monkeypatch) == 0
    page = (repository / "docs" / "promises.md").read_text()
    assert "Result: 1 of 3 measurements hold; none that was made fails; not measured: press, after.\n" in page
    assert page.count("| the run was interrupted | all pass | not measured |") == 2


def test_without_git_there_is_nothing_to_clone(repository, monkeypatch, tmp_path):
    monkeypatch.setattr(promises, "ROOT", tmp_path / "nothing")
    with pytest.raises(SystemExit, match="cannot be cloned"):
        run(monkeypatch)


def test_every_promise_is_tried_by_files_that_are_there():
    measures = [measure for promise in PROMISES for measure in promise.measures]
    names = [measure.name for measure in measures]
    assert len(PROMISES) == 8
    assert len(set(names)) == len(names)
    for measure in measures:
        for word in measure.words:
            if word.startswith(("tests/", "benchmarks/", "docs/")):
                assert (ROOT / word).exists(), f"{measure.name}: {word}"
            if word.startswith("tests."):
                assert importlib.util.find_spec(word), f"{measure.name}: {word}"
    for promise in PROMISES:
        assert any(not measure.needs for measure in promise.measures), f"{promise.title} is tried on any machine"


def test_the_page_has_the_rows_of_the_list():
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    for promise in PROMISES:
        assert f"## {promise.title}\n" in page
        for measure in promise.measures:
            assert page.count(f"(`{measure.name}`) | `python {' '.join(measure.words)}` |") == 1, measure.name
