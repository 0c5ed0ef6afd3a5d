"""Drives of a running daemon, as its operator sees them: mirrors at start and later, fault plans, counters."""

from __future__ import annotations

import shutil
import urllib.request

import grpc
import grpc.aio
import pytest
from daemons import command, eventually, on_loop
from prometheus_client.parser import text_string_to_metric_families
from rigs import EXPERTS, LAYERS, RECORD, copy_of, make_toy, plan_file

from tierd.api import admin_pb2 as pb
from tierd.api import admin_pb2_grpc, store_pb2, store_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS
from tierd.store.synthetic import expected_record

HTTP = "127.0.0.1:0"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy") / "store")


def ask(daemon, call):
    """One call of an admin stub; the answer, or the error."""

    async def run():
        async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            try:
                return await call(admin_pb2_grpc.AdminServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                return error

    return on_loop(run())


def add(daemon, directory, weight=0.0):
    return ask(daemon, lambda stub: stub.AddMirror(pb.AddMirrorRequest(directory=str(directory), weight=weight)))


def remove(daemon, name):
    return ask(daemon, lambda stub: stub.RemoveMirror(pb.RemoveMirrorRequest(name=str(name))))


def read_layer(daemon, store, layer):
    """All experts of a layer through the daemon; every byte is checked."""

    async def run():
        async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            request = store_pb2.ReadExpertsRequest(layer=layer, experts=range(EXPERTS))
            got = {}
            async for message in stub.ReadExperts(request):
                got.setdefault(message.expert, bytearray()).extend(message.data)
            return got

    got = on_loop(run(), 60)
    assert got == {expert: expected_record(store.manifest, layer, expert) for expert in range(EXPERTS)}


def read_everything(daemon, store):
    for layer in range(LAYERS):
        read_layer(daemon, store, layer)


def samples(daemon):
    with urllib.request.urlopen(f"{daemon.http}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_drive(found, name, drive, **labels):
    return found[(name, *sorted({"drive": drive, "tier": "nvme", **labels}.items()))]


def test_mirrors_given_at_the_start_serve_and_what_does_not_fit_is_named(serve, toy, tmp_path):
    good, bad = copy_of(toy, tmp_path / "good"), copy_of(toy, tmp_path / "bad", shards=[0, 1])
    cut = bad / toy.shard_paths[1].name
    cut.write_bytes(cut.read_bytes()[:-4096])
    daemon = serve(toy.path, "--mirror", f"{good}=1.5", "--mirror", bad, "--arena", f"{8 * RECORD}")
    read_everything(daemon, toy)
    nvme, first, second = daemon.stats()["drives"]
    assert [drive["name"] for drive in (nvme, first, second)] == ["nvme", "mirror1", "mirror2"]
    assert (first["directory"], first["weight"], len(first["shards"])) == (str(good), 1.5, 4)
    assert second["shards"] == [toy.shard_paths[0].name]
    assert LAYERS * EXPERTS <= nvme["reads"] + first["reads"] + second["reads"] <= LAYERS * EXPERTS + 8
    assert nvme["up"]
    assert first["up"]
    (warning,) = [event for event in daemon.events if event["event"] == "file left out"]
    assert str(cut) in warning["problem"]
    assert str(toy.shard_paths[1]) in warning["problem"]
    assert "4096 bytes are missing" in warning["problem"]
    assert f"mirror1 {good} · 4 of 4 shards" in daemon.log
    assert f"mirror2 {bad} · 1 of 4 shards · 1 files left out" in daemon.log


def test_mirrors_come_and_go_while_it_runs(serve, toy, tmp_path):
    mirror, empty = copy_of(toy, tmp_path / "mirror"), tmp_path / "empty"
    empty.mkdir()
    daemon = serve(toy.path, "--arena", f"{8 * RECORD}")
    answer = add(daemon, mirror)
    assert (answer.drive.name, answer.drive.state, answer.drive.shards_total) == ("mirror1", "up", 4)
    read_everything(daemon, toy)
    for directory, reason in [
        (empty, "holds no copy"),
        (tmp_path / "absent", "is not a directory"),
        ("relative/path", "give the whole path"),
        (toy.path, "in use already"),
    ]:
        error = add(daemon, directory)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in error.details()
    assert remove(daemon, mirror).name == "mirror1"
    assert [drive["name"] for drive in daemon.stats()["drives"]] == ["nvme"]
    for name in ("mirror1", "nvme", "nonsense"):
        error = remove(daemon, name)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "there is no mirror" in error.details()
    read_everything(daemon, toy)
    assert add(daemon, mirror, 0.5).drive.weight == 0.5
    read_everything(daemon, toy)


def test_a_mirror_in_use_that_has_grown_and_changed_is_looked_at_anew(serve, toy, tmp_path):
    whole, mirror = copy_of(toy, tmp_path / "whole"), copy_of(toy, tmp_path / "mirror", shards=[0, 1])
    cut = mirror / toy.shard_paths[1].name
    daemon = serve(toy.path, "--mirror", mirror, "--arena", f"{8 * RECORD}")
    read_everything(daemon, toy)
    # As staging and repair do it: a new file takes the place of the old one.
    for path in toy.shard_paths[2:]:
        shutil.copy(whole / path.name, mirror / path.name)
    spoilt = tmp_path / "spoilt"
    spoilt.write_bytes(cut.read_bytes()[:-4096])
    spoilt.replace(cut)
    answer = add(daemon, mirror, 0.5).drive
    assert (answer.name, answer.weight) == ("mirror1", 0.5)
    assert [str(cut) in problem for problem in answer.left_out] == [True]
    names = [path.name for path in toy.shard_paths]
    _, again = daemon.stats()["drives"]
    assert (again["name"], again["shards"], again["up"]) == ("mirror1", [names[0], names[2], names[3]], True)
    read_everything(daemon, toy)
    shutil.copy(whole / cut.name, mirror / cut.name)
    assert len(add(daemon, mirror).drive.shards) == 4
    for path in mirror.iterdir():
        path.unlink()
    error = add(daemon, mirror)
    assert "holds no copy" in error.details()
    assert len(daemon.stats()["drives"][1]["shards"]) == 4, "what is open goes on being read from"
    read_everything(daemon, toy)


def test_the_last_holder_of_a_shard_cannot_be_removed(serve, toy, tmp_path):
    part, other = copy_of(toy, tmp_path / "part"), copy_of(toy, tmp_path / "other", shards=[0])
    (part / toy.shard_paths[0].name).unlink()
    daemon = serve(part, "--also", other, "--arena", f"{8 * RECORD}")
    read_everything(daemon, toy)
    assert "holds 1 shards that no other drive has" in remove(daemon, "also1").details()
    spare = copy_of(toy, tmp_path / "spare", shards=[0])
    add(daemon, spare)
    assert remove(daemon, "also1").name == "also1"
    read_everything(daemon, toy)


def test_paths_are_not_opened_for_callers_over_tcp(serve, toy, tmp_path):
    daemon = serve(toy.path, listen="127.0.0.1:0")
    for error in (add(daemon, copy_of(toy, tmp_path / "mirror")), remove(daemon, "nvme")):
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "--mirror" in error.details()


def test_under_a_fault_plan_bytes_are_right_and_every_counter_agrees(serve, toy, tmp_path):
    faults = [
        {"kind": kind, "probability": share, "drive": drive, "seconds": 0.01, "experts": list(range(first, 64, 2))}
        for kind, share in (("eio", 0.3), ("short", 0.05), ("flip", 0.05), ("delay", 0.1), ("hang", 0.02))
        for first, drive in enumerate(("nvme", "mirror1"))
    ]
    mirror = copy_of(toy, tmp_path / "mirror")
    plan = plan_file(tmp_path / "plan.json", *faults, seed=11)
    daemon = serve(
        toy.path, "--mirror", mirror, "--fault-plan", plan, "--arena", f"{8 * RECORD}", "--drive-threads", "2",
        http=HTTP,
    )  # fmt: skip
    assert "FAULT PLAN ACTIVE" in daemon.log
    for _ in range(3):
        read_everything(daemon, toy)
    # A read that was hedged comes later than the answer.
    eventually(lambda: not any(drive["in_flight"] for drive in daemon.stats()["drives"]))
    found, drives = samples(daemon), {drive["name"]: drive for drive in daemon.stats()["drives"]}
    assert sum(value for key, value in found.items() if key[0] == "tierd_faults_injected_total") > 3
    assert drives["nvme"]["errors"] + drives["mirror1"]["errors"] > 3
    for name, drive in drives.items():
        assert of_drive(found, "tierd_drive_read_bytes_total", name) == drive["bytes"]
        assert of_drive(found, "tierd_fault_wrapper_bytes_total", name) == drive["bytes"]
        assert of_drive(found, "tierd_drive_reads_total", name) == drive["reads"]
        by_kind = sum(v for key, v in found.items() if key[0] == "tierd_drive_errors_total" and ("drive", name) in key)
        assert by_kind == drive["errors"] == sum(drive["errors_by_kind"].values())
        assert of_drive(found, "tierd_drive_failovers_total", name) == drive["failovers"]
        assert of_drive(found, "tierd_drive_up", name) == drive["up"]
        assert of_drive(found, "tierd_drive_read_seconds_count", name) == drive["reads"] + drive["errors"]
    slots = {key[1][1]: value for key, value in found.items() if key[0] == "tierd_arena_slots"}
    arena = daemon.stats()["arena"]
    # What is withdrawn has no memory: the arena could grow into it.
    assert sum(slots.values()) - slots["withdrawn"] == arena["slots"] + arena["spare_slots"]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [("--fault-plan", '[[fault]]\nkind = "fire"', "fault.0.kind"), ("--mirror", "/x=0", "positive number")],
)
def test_a_wrong_option_is_refused_by_name(toy, tmp_path, option, value, words):
    if option == "--fault-plan":
        (tmp_path / "plan.toml").write_text(value)
        value = tmp_path / "plan.toml"
    refused = command("tierd", "serve", toy.path, option, value, "--http", "off", "--listen", f"unix:{tmp_path}/s")
    assert refused.returncode == 2
    assert str(value) in refused.stderr.replace("\n", "")
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_tokens_are_the_same_with_a_mirror_and_under_a_fault_plan(serve, node, embedded_store, reference, tmp_path):
    mirror = tmp_path / "mirror"
    shutil.copytree(embedded_store, mirror)
    faults = [
        {"kind": kind, "probability": 0.05, "seconds": 0.005, "drive": drive, "experts": list(range(first, 1024, 2))}
        for kind in ("eio", "short", "flip", "delay")
        for first, drive in enumerate(("nvme", "mirror1"))
    ]
    plan = plan_file(tmp_path / "plan.json", *faults, seed=5)
    daemon = serve(embedded_store, "--mirror", mirror, "--fault-plan", plan, "--arena", "25%")
    done = node(daemon, tokens=32).finish()
    assert done["token_ids"] == reference["token_ids"][:32]
    drives = daemon.stats()["drives"]
    assert sum(drive["errors"] for drive in drives) > 10
    assert all(drive["reads"] > 10 for drive in drives)
