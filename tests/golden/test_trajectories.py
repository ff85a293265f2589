"""The original trainer's own runs, step by step, through `train_hf.py`.

Tolerances are those measured between honest variants of the original itself (another attention kernel, another
micro-batch) times five: that is the spread a right implementation shows. Cross-entropy of the first ten steps is held
to 5e-6, their gradient norms to 1e-4 relative. Learning rates and instance ids are exact.
"""

import numpy as np
import pytest

from tests.forks import Forks
from tests.golden.trajectories import RUNS, Pair, run_again


@pytest.fixture(scope="module", params=RUNS)
def pair(request: pytest.FixtureRequest, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    return run_again(request.param, directory, lambda config, ranks: forks.run(config, ranks=ranks))


def test_every_step_is_there(pair: Pair) -> None:
    assert pair.ours["step"].tolist() == pair.theirs["step"].tolist()
    assert pair.ours["throughput/total_tokens"].tolist() == pair.theirs["tokens"].tolist()


def test_losses_follow_the_original(pair: Pair) -> None:
    difference = np.abs(pair.ours["train/CrossEntropyLoss"] - pair.theirs["loss_ce"])
    assert difference[:10].max() <= 5e-6
    assert difference.max() <= pair.tolerances["ce"]
    if pair.name == "t01n_no_zloss":
        assert "train/ZLoss" not in pair.ours
        assert not np.any(pair.theirs["loss_z"] > 0)
    else:
        # z is a small multiple of squares near 40: the relative precision of cross-entropy
        np.testing.assert_allclose(pair.ours["train/ZLoss"], pair.theirs["loss_z"], rtol=pair.tolerances["ce"])


def test_gradient_norms_follow_the_original(pair: Pair) -> None:
    ours, theirs = pair.ours["optim/total_grad_norm"], pair.theirs["grad_norm"]
    np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-4)
    np.testing.assert_allclose(ours, theirs, rtol=pair.tolerances["norm"])


def test_the_norm_of_every_gradient_follows_the_original(pair: Pair) -> None:
    ours = pair.fused("grad", pair.theirs["param_names"])
    # Of the whole gradient: a tensor that hardly has one is all rounding.
    scale = pair.theirs["grad_norm"][:, None]
    difference = np.abs(ours - pair.theirs["grad_norm_per_param"]) / scale
    assert difference[:10].max() <= 1e-4
    assert difference.max() <= pair.tolerances["norm"]


def test_learning_rates_are_exact(pair: Pair) -> None:
    np.testing.assert_array_equal(pair.ours["optim/learning_rate_group0"], pair.theirs["lr"])
    np.testing.assert_array_equal(pair.ours["optim/learning_rate_group1"], pair.theirs["lr"])


def test_clipping_rates_are_the_same(pair: Pair) -> None:
    recorded = np.isfinite(pair.theirs["clip_rate"])
    # The original does not tell it for Lion.
    assert recorded.all() != (pair.name == "t06_lionw")
    np.testing.assert_allclose(
        pair.ours["optim/clipping_rate"][recorded], pair.theirs["clip_rate"][recorded], atol=1e-6
    )


def test_the_memory_of_adaptive_clipping_is_the_originals(pair: Pair) -> None:
    adaptive = pair.name in ("t03_adaptive", "t03b_adaptive_and_fixed")
    assert ("grad_norm_exp_avg" in pair.theirs.files) == adaptive
    if adaptive:
        ours = pair.memory(pair.theirs["param_names"])
        assert np.isnan(ours[0]).all(), "it begins with the second step; the original shows the norm itself before"
        theirs = pair.theirs["grad_norm_exp_avg"][1:]
        np.testing.assert_allclose(ours[1:], theirs, rtol=pair.tolerances["norm"], atol=1e-7)


def test_masked_instances_are_counted(pair: Pair) -> None:
    counted = pair.ours.get("train/masked_instances")
    filtered = RUNS[pair.name]["config"]["data"].get("instance_filter") is not None
    assert (counted is not None) == filtered
    if counted is not None and RUNS[pair.name]["world_size"] == 1:
        assert counted.tolist() == pair.theirs["masked"].tolist()


def test_instances_are_the_same(pair: Pair) -> None:
    assert pair.instances_are_equal()


def test_final_weights_are_the_originals(pair: Pair) -> None:
    assert pair.weight_difference() <= pair.tolerances["weight"]
