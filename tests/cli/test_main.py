"""`olmo-hf`: verbs are found by their files, help costs nothing, errors are sentences."""

import subprocess
import sys
from pathlib import Path

import pytest

from olmo_hf.cli import main as cli

ROOT = Path(__file__).parent.parent.parent
VERBS = sorted(path for path in (ROOT / "olmo_hf" / "cli").glob("[a-z]*.py") if path.stem != "main")

VERB = """
from olmo_hf.errors import DataError

HELP = "says what it was given"

def add_arguments(parser):
    parser.add_argument("word")
    parser.add_argument("--times", type=int, default=1, help="how often")

def run(namespace):
    if namespace.word == "bad":
        raise DataError("tokens.npy: is empty; give another file")
    print(namespace.word * namespace.times)
    return 3 if namespace.word == "three" else 0
"""


@pytest.fixture
def verbs(tmp_path, monkeypatch):
    """A folder of verbs with one that works and one that cannot even be imported."""
    import olmo_hf.cli

    (tmp_path / "say_it.py").write_text(VERB)
    (tmp_path / "broken.py").write_text('HELP = "cannot be imported"\nimport no_such_package\n')
    monkeypatch.setattr(cli, "_HOME", tmp_path)
    monkeypatch.setattr(olmo_hf.cli, "__path__", [str(tmp_path)])
    yield tmp_path
    sys.modules.pop("olmo_hf.cli.say_it", None)


def test_help_lists_every_verb_without_importing_it(verbs, capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "say-it  says what it was given" in out
    assert "broken  cannot be imported" in out
    assert "olmo_hf.cli.say_it" not in sys.modules


def test_help_imports_nothing_heavy():
    code = "import sys; from olmo_hf.cli.main import main; main(['--help']);"
    code += "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_verb_gets_its_arguments_and_gives_the_exit_status(verbs, capsys):
    assert cli.main(["say-it", "yes", "--times", "2"]) == 0
    assert capsys.readouterr().out == "yesyes\n"
    assert cli.main(["say-it", "three"]) == 3


def test_an_error_for_people_is_a_sentence_on_stderr_and_status_2(verbs, capsys):
    from olmo_hf.errors import DataError

    assert cli.main(["say-it", "bad"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "olmo-hf say-it: tokens.npy: is empty; give another file\n"
    with pytest.raises(DataError):
        cli.main(["say-it", "bad", "--debug"])


def test_an_unknown_verb_is_refused_with_the_nearest_one(verbs, capsys):
    assert cli.main(["say_it"]) == 2
    assert "did you mean `say-it`?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "lists the commands" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_unknown_options_of_a_verb_are_refused(verbs, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["say-it", "yes", "--tymes", "2"])
    assert caught.value.code == 2


@pytest.mark.parametrize("path", VERBS, ids=lambda path: path.stem)
def test_every_shipped_verb_has_its_three_parts(path):
    assert cli.help_line(path).strip()
    verb = path.stem.replace("_", "-")
    done = subprocess.run([sys.executable, "-m", "olmo_hf.cli.main", verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: olmo-hf {verb}")
    assert "def run(" in path.read_text(encoding="utf-8")


def test_a_closed_pipe_is_not_an_error(verbs):
    code = "import sys; from olmo_hf.cli import main; main._HOME = __import__('pathlib').Path(sys.argv[1]);"
    code += "import olmo_hf.cli; olmo_hf.cli.__path__ = [sys.argv[1]];"
    code += "sys.exit(main.main(['say-it', 'x' * 1000, '--times', '1000']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(verbs)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert "Traceback" not in errors
    assert process.returncode == 0
