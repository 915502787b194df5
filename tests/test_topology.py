"""Topology: sizes and names, megatron-core's rank order, and the table of differences."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from megaresume.errors import ConfigurationError, FormatError
from megaresume.topology import (
    Coordinate,
    Difference,
    RunShape,
    Topology,
    compare,
    coordinate_of_rank,
    file_stem,
    format_differences,
    shard_names,
)

MODEL = {
    "hidden_size": 64,
    "num_layers": 4,
    "layers_per_stage": [2, 2],
    "padded_vocab_size": 256,
    "params_dtype": "torch.bfloat16",
    "trainable": {"digest": "ab12", "count": 40},
    "model_chunks": 1,
}


def differences(saved: Topology, current: Topology, **changed_facts: Any) -> dict[str, Difference]:
    found = compare(RunShape(saved, MODEL), RunShape(current, {**MODEL, **changed_facts}))
    assert len({each.field for each in found}) == len(found)
    return {each.field: each for each in found}


# ---- sizes, coordinates, names


def test_world_size_counts_dense_ranks_only() -> None:
    topology = Topology(tp=2, pp=3, dp=4, cp=5, ep=4, etp=1, vpp=2, extra={"heads": 7})
    assert topology.world_size == 2 * 3 * 4 * 5
    assert topology.expert_dp == 2 * 4 * 5 // 4


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "dp": 2, "order": "tp-cp-ep-pp-dp"},
        {"tp": 2, "pp": 2, "dp": 2, "order": "pp-dp-tp"},
        {"tp": 2, "pp": 1, "dp": 2, "cp": 2, "etp": 2},
        {"tp": 1, "pp": 2, "dp": 4, "ep": 2},
        {"tp": 2, "pp": 2, "dp": 4, "cp": 1, "ep": 2, "etp": 2},
        {"tp": 4, "pp": 2, "dp": 2, "ep": 4, "etp": 1},
        {"tp": 2, "pp": 2, "dp": 2, "cp": 2, "ep": 4, "etp": 1},
        {"tp": 2, "pp": 1, "dp": 4, "ep": 2, "etp": 2, "order": "ep-tp-dp-pp"},
    ],
    ids=str,
)
def test_coordinates_are_megatron_cores_own(sizes: dict[str, Any]) -> None:
    from megatron.core.parallel_state import RankGenerator

    topology = Topology(**sizes)
    dense = RankGenerator(tp=topology.tp, ep=1, dp=topology.dp, pp=topology.pp, cp=topology.cp, order=topology.order)
    expert = RankGenerator(
        tp=topology.etp, ep=topology.ep, dp=topology.expert_dp, pp=topology.pp, cp=1, order=topology.order
    )

    def position(grid: RankGenerator, axis: str, rank: int) -> int:
        return next(group.index(rank) for group in grid.get_ranks(axis) if rank in group)

    for rank in range(topology.world_size):
        assert coordinate_of_rank(rank, topology) == Coordinate(
            **{axis: position(dense, axis, rank) for axis in ("tp", "pp", "dp", "cp")},
            ep=position(expert, "ep", rank),
            etp=position(expert, "tp", rank),
        )


def test_file_stem_names_cp_and_ep_only_where_they_are_used() -> None:
    assert file_stem(Coordinate(1, 0, 12), Topology(2, 2, 128)) == "tp01-pp00-dp12"
    assert file_stem(Coordinate(1, 0, 127), Topology(2, 2, 128)) == "tp01-pp00-dp127"
    assert file_stem(Coordinate(0, 1, 0, cp=1), Topology(1, 2, 1, cp=2)) == "tp00-pp01-dp00-cp01"
    assert file_stem(Coordinate(0, 0, 3, ep=1), Topology(1, 1, 4, ep=2)) == "tp00-pp00-dp03-ep01"


def test_file_stem_refuses_a_position_outside_the_topology() -> None:
    with pytest.raises(ConfigurationError, match=r"pp position 2 is outside 0\.\.1"):
        file_stem(Coordinate(0, 2, 0), Topology(2, 2, 2))
    with pytest.raises(ConfigurationError, match="rank 8 is not one of the 8 ranks"):
        coordinate_of_rank(8, Topology(2, 2, 2))


def test_shard_names_follow_global_ranks() -> None:
    assert shard_names(Topology(2, 2, 1)) == [
        f"tp{tp:02d}-pp{pp:02d}-dp00.safetensors" for pp, tp in product(range(2), range(2))
    ]
    assert shard_names(Topology(2, 1, 2, order="dp-tp"))[1] == "tp00-pp00-dp01.safetensors"


@pytest.mark.parametrize(
    "topology",
    [Topology(2, 2, 2), Topology(2, 2, 4, cp=2, ep=4), Topology(4, 2, 2, ep=4), Topology(3, 5, 7, order="pp-tp-dp")],
    ids=str,
)
def test_t11_shard_names_are_unique_over_the_world(topology: Topology) -> None:
    names = shard_names(topology)
    assert len(set(names)) == len(names) == topology.world_size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0, "pp": 1, "dp": 1}, "tp must be a whole number of at least 1, found 0"),
        ({"tp": 1, "pp": 1, "dp": -2}, "dp must be"),
        ({"tp": True, "pp": 1, "dp": 1}, "tp must be a whole number of at least 1, found True"),
        ({"tp": 1, "pp": 2.0, "dp": 1}, "pp must be"),
        ({"tp": 1, "pp": 1, "dp": 4, "ep": 3}, "not divisible by etp x ep x pp = 1 x 3 x 1"),
        ({"tp": 1, "pp": 1, "dp": 2, "vpp": 2}, "vpp 2 needs pp > 1"),
        ({"tp": 1, "pp": 1, "dp": 2, "order": "tp-xx-dp"}, "order must name each of"),
        ({"tp": 1, "pp": 1, "dp": 2, "order": "tp-dp-dp"}, "at most once"),
        ({"tp": 2, "pp": 1, "dp": 2, "order": "tp-pp"}, "leaves out dp, whose size is not 1"),
        ({"tp": 1 << 20, "pp": 1 << 20, "dp": 1}, "ranks, at most"),
        ({"tp": 1, "pp": 1, "dp": 1, "extra": {"tp": 2}}, "'tp' cannot be the name of an extra axis"),
        ({"tp": 1, "pp": 1, "dp": 1, "extra": {"heads": 0}}, "heads must be"),
    ],
)
def test_impossible_topologies_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology(**sizes)


# ---- JSON


def test_json_round_trip_keeps_unknown_axes() -> None:
    topology = Topology(2, 2, 4, cp=2, ep=2, etp=2, vpp=2, order="tp-cp-ep-pp-dp", extra={"heads": 3})
    text = json.dumps(topology.to_json())
    assert Topology.from_json(json.loads(text), source="manifest.json") == topology
    assert pickle.loads(pickle.dumps(topology)) == topology


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": "2"}, "tp must be a whole number of at least 1, found '2'"),
        ({"dp": 2.0}, "dp must be"),
        ({"pp": True}, "pp must be"),
        ({"cp": None}, "cp must be"),
        ({"order": 5}, "order must be text"),
        ({"heads": "many"}, "heads must be"),
        ({"tp": 10**9}, "ranks, at most"),
    ],
)
def test_json_of_wrong_types_is_refused_by_file_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=rf"manifest\.json: topology: .*{message}"):
        Topology.from_json({**Topology(2, 2, 2).to_json(), **change}, source="manifest.json")


def test_json_with_missing_axes_names_them_all() -> None:
    with pytest.raises(FormatError, match=r"manifest\.json: topology lacks dp, cp, ep, etp, vpp, order"):
        Topology.from_json({"tp": 2, "pp": 2}, source="manifest.json")
    with pytest.raises(FormatError, match="must be an object"):
        Topology.from_json([2, 2, 2], source="manifest.json")


# ---- differences


def test_same_shape_has_no_differences_after_a_trip_through_json() -> None:
    live = RunShape(Topology(2, 2, 2), {**MODEL, "layers_per_stage": (2, 2), "num_moe_experts": None})
    stored = RunShape(
        Topology.from_json(live.topology.to_json(), source="manifest.json"),
        json.loads(json.dumps({**MODEL, "layers_per_stage": (2, 2)})),
    )
    assert compare(stored, live) == []
    assert format_differences([]) == "no differences"


@pytest.mark.parametrize(
    ("current", "fields"),
    [
        (Topology(1, 1, 4), {"tp", "dp"}),
        (Topology(2, 2, 1), {"pp", "dp"}),
        (Topology(2, 1, 4), {"dp", "world_size"}),
        (Topology(2, 1, 1), {"dp", "world_size"}),
    ],
    ids=["tp=1,dp=4", "pp=2", "dp=4", "dp=1"],
)
def test_t01_names_the_sizes_that_differ_and_what_may_be_done(current: Topology, fields: set[str]) -> None:
    saved = Topology(2, 1, 2)
    found = differences(saved, current)
    assert found.keys() == fields
    for name in fields:
        assert found[name].checkpoint == str(getattr(saved, name))
        assert found[name].this_run == str(getattr(current, name))
        assert found[name].reshapable
    assert "Resharding is not in this release" in format_differences(list(found.values()))


def test_t02_fewer_ranks_are_refused_as_more_ranks_are() -> None:
    two, four = Topology(1, 1, 2), Topology(1, 1, 4)
    assert differences(four, two).keys() == differences(two, four).keys() == {"dp", "world_size"}
    assert "start 4 ranks" in differences(four, two)["world_size"].remedy
    assert "start 2 ranks" in differences(two, four)["world_size"].remedy


def test_t09_further_axes_are_recorded_and_compared() -> None:
    dense, expert = Topology(1, 1, 4), Topology(1, 1, 4, ep=2)
    assert differences(expert, expert) == {}
    assert differences(expert, dense)["ep"].remedy == "run with --expert-model-parallel-size 2"
    assert differences(dense, expert)["ep"].this_run == "2"
    assert differences(Topology(1, 1, 4, cp=2), Topology(1, 1, 8))["cp"].checkpoint == "2"


def test_t09_axes_of_the_users_own_are_recorded_and_compared() -> None:
    plain, own = Topology(1, 1, 4), Topology(1, 1, 4, extra={"heads": 2})
    stored = Topology.from_json(json.loads(json.dumps(own.to_json())), source="manifest.json")
    assert differences(stored, own) == {}
    assert differences(plain, Topology(1, 1, 4, extra={"heads": 1})) == {}
    (found,) = differences(stored, plain).values()
    assert (found.field, found.checkpoint, found.this_run) == ("heads", "2", "1 (not declared)")
    assert not found.reshapable


def test_order_differs_only_where_it_moves_a_rank() -> None:
    assert differences(Topology(2, 2, 2), Topology(2, 2, 2, order="tp-dp-pp")) == {}
    assert differences(Topology(2, 1, 2), Topology(2, 1, 2, order="tp-cp-ep-pp-dp")) == {}
    (found,) = differences(Topology(2, 2, 2, order="tp-cp-ep-pp-dp"), Topology(2, 2, 2)).values()
    assert (found.field, found.remedy, found.reshapable) == ("order", "run with --use-tp-pp-dp-mapping", True)
    own = Topology(2, 2, 2, order="pp-tp-dp")
    assert 'order="pp-tp-dp"' in differences(own, Topology(2, 2, 2))["order"].remedy


@pytest.mark.parametrize(
    ("fact", "value", "remedy"),
    [
        ("hidden_size", 128, "run with --hidden-size 64"),
        ("num_layers", 8, "run with --num-layers 4"),
        ("layers_per_stage", [3, 1], "--pipeline-model-parallel-layout"),
        ("padded_vocab_size", 384, "--make-vocab-size-divisible-by"),
        ("params_dtype", "torch.float32", "run with --bf16"),
        ("trainable", {"digest": "cd34", "count": 40}, "freeze and train the same parameters"),
        ("model_chunks", 2, "1 chunks per stage"),
        ("num_moe_experts", 8, "the checkpoint's value"),
    ],
)
def test_model_facts_cannot_be_reshaped(fact: str, value: Any, remedy: str) -> None:
    (found,) = differences(Topology(2, 2, 2), Topology(2, 2, 2), **{fact: value}).values()
    assert found.field.split(".")[0] == fact
    assert remedy in found.remedy
    assert not found.reshapable
    assert f"No reshard can change these, the checkpoint is of another run or model: {found.field}." in (
        format_differences([found])
    )


def test_a_missing_fact_differs_and_types_count() -> None:
    (lost,) = differences(Topology(1, 1, 1), Topology(1, 1, 1), hidden_size=None).values()
    assert (lost.checkpoint, lost.this_run) == ("64", "not recorded")
    assert differences(Topology(1, 1, 1), Topology(1, 1, 1), model_chunks=True).keys() == {"model_chunks"}


def test_an_even_layer_split_follows_the_pipeline_and_an_uneven_one_does_not() -> None:
    followed = differences(Topology(1, 2, 2), Topology(1, 4, 1), layers_per_stage=[1, 1, 1, 1])
    assert followed.keys() == {"pp", "dp", "layers_per_stage"}
    assert followed["layers_per_stage"].reshapable
    uneven = differences(Topology(1, 2, 2), Topology(1, 4, 1), layers_per_stage=[2, 1, 1, 0])
    assert not uneven["layers_per_stage"].reshapable


def test_every_difference_is_reported_at_once_in_a_table() -> None:
    found = compare(
        RunShape(Topology(2, 2, 2), MODEL),
        RunShape(Topology(1, 4, 4, vpp=2, etp=1), {**MODEL, "hidden_size": 128, "params_dtype": "torch.float16"}),
    )
    lines = format_differences(found).splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == [
        "tp", "pp", "dp", "vpp", "world_size", "hidden_size", "params_dtype",
    ]  # fmt: skip
    starts = {line.index(each.remedy) for line, each in zip(lines[2:-2], found, strict=True)}
    assert starts == {lines[0].index("what to do")}, "columns stand under their heads"
    assert lines[2].split(maxsplit=3) == ["tp", "2", "1", "run with --tensor-model-parallel-size 2"]
    assert lines[-2].endswith("the checkpoint's: tp, pp, dp, vpp, world_size.")
    assert lines[-1].endswith("another run or model: hidden_size, params_dtype.")


def test_long_values_are_cut_where_they_differ_and_text_from_a_file_stays_on_its_line() -> None:
    layers = [1] * 60
    saved = RunShape(Topology(1, 2, 1), {**MODEL, "layers_per_stage": [*layers, 5, *layers]})
    (cut,) = compare(saved, RunShape(Topology(1, 2, 1), {**MODEL, "layers_per_stage": [*layers, 7, *layers]}))
    assert "5" in cut.checkpoint and "7" in cut.this_run and len(cut.this_run) < 50
    hostile = RunShape(Topology(1, 2, 1), {**MODEL, "params_dtype": "x{0}\n\x1b[2J"})
    table = format_differences(compare(hostile, RunShape(Topology(1, 2, 1), MODEL)))
    assert len(table.splitlines()) == 4 and "\x1b" not in table


def test_text_form_leaves_out_what_nobody_set() -> None:
    assert str(Topology(2, 2, 2, etp=2)) == "tp=2 pp=2 dp=2 (8 ranks)"
    assert str(Topology(1, 1, 4, ep=2, order="tp-ep-dp", extra={"heads": 2})) == (
        "tp=1 pp=1 dp=4 ep=2 heads=2 order=tp-ep-dp (4 ranks)"
    )


def test_topology_and_trainer_state_need_no_torch() -> None:
    modules = "megaresume.topology, megaresume.state.trainer_state, megaresume.state.foreign_trainer_state"
    check = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
