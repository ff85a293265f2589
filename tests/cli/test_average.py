"""`olmo-hf average` as a person types it."""

from olmo_hf.cli.main import main
from tests.model.tiny import tiny_model


def test_check_average_and_refuse(tmp_path, capsys):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        tiny_model().save_pretrained(path)
    words = ["average", *map(str, paths)]
    assert main([*words, "--check"]) == 0
    assert "agree" in capsys.readouterr().out
    assert main([*words, "-o", str(tmp_path / "soup"), "--weights", "1", "1", "2"]) == 0
    assert "share 0.5" in capsys.readouterr().out
    assert (tmp_path / "soup" / "lineage.json").is_file()
    assert main([*words, "-o", str(tmp_path / "soup")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(words) == 2
    assert "-o" in capsys.readouterr().err
