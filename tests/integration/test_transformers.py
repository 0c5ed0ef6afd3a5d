"""Models of transformers on experts from a daemon: the tokens of the unmodified model, whatever lies in RAM."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from daemons import daemons_in

pytestmark = pytest.mark.oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_transformers import MODELS, tiny_model  # noqa: E402

from tierd.checkpoint.convert import Conversion, convert  # noqa: E402
from tierd.checkpoint.quantise import dequantise_int4, dequantise_int8  # noqa: E402
from tierd.errors import StoreDamaged, UnsupportedModel, UsageError  # noqa: E402
from tierd.integrations.transformers import load  # noqa: E402
from tierd.integrations.transformers.check import check, compare  # noqa: E402
from tierd.integrations.transformers.conversion import plan_by_transformers  # noqa: E402
from tierd.integrations.transformers.experts import StepCancelled  # noqa: E402
from tierd.integrations.transformers.records import RecordReader  # noqa: E402
from tierd.store.store import ExpertStore  # noqa: E402


def make(name, folder, dtype=None):
    """A tiny checkpoint of random weights, as `save_pretrained` writes it."""
    tiny_model(name).to(dtype or torch.float32).save_pretrained(folder)
    return folder


def to_store(checkpoint, path, **options):
    """A store made by transformers' rules."""
    Conversion.prepare(checkpoint, path, planner=plan_by_transformers, **options).run()
    return path


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory):
    root = tmp_path_factory.mktemp("olmoe")
    make("olmoe", root / "checkpoint")
    to_store(root / "checkpoint", root / "store", experts="f32")
    return root


@pytest.fixture
def unmodified(olmoe):
    return transformers.AutoModelForCausalLM.from_pretrained(olmoe / "checkpoint", dtype=torch.float32).eval()


def prompt(tokens=24):
    return torch.from_numpy(np.random.Generator(np.random.Philox(3)).integers(3, 380, (1, tokens)))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_quarter_of_the_experts_in_ram_gives_the_unmodified_models_tokens(name, tmp_path):
    result = check(make(name, tmp_path), arena="25%")
    assert result.supported, result.reason
    assert result.greedy_match, result.reason
    assert result.max_logit_error <= 1e-5 * max(1.0, result.logit_scale)
    assert 0 < result.misses < result.unique_experts


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_store_of_a_known_family_runs_in_transformers_too(name, tmp_path, request):
    folder = request.config.rootpath / "tests" / "oracles" / name
    convert(folder, tmp_path / "store", experts="f32", dense="f32")
    model = load(tmp_path / "store", arena="50%", attn_implementation="eager")
    with np.load(folder / "ref.npz") as reference, torch.no_grad():
        logits = model(input_ids=torch.from_numpy(reference["input_ids"]), use_cache=False).logits
        assert np.abs(logits.numpy() - reference["logits"]).max() < 1e-5
        answer = model.generate(torch.from_numpy(reference["input_ids"]), max_new_tokens=16, do_sample=False)
        assert answer[0, 24:].tolist() == reference["greedy"].tolist()
    model.tierd.close()


def test_routed_experts_are_never_allocated(olmoe):
    model = load(olmoe / "store", in_process=True)
    held = sum(value.nbytes for value in [*model.parameters(), *model.buffers()])
    dense = ExpertStore.open(olmoe / "store").manifest.dense_bytes
    assert held <= dense + 4096
    assert type(model) is transformers.OlmoeForCausalLM
    assert all(module.gate_up_proj.is_meta for module in model.modules() if hasattr(module, "gate_up_proj"))
    model.tierd.close()


def test_the_nodes_own_count_is_what_the_source_was_asked_for(olmoe, unmodified):
    model = load(olmoe / "store", arena="25%")
    result = compare(unmodified, model, prompt())
    stats = model.tierd.stats
    assert result.greedy_match
    assert stats.requested == model.tierd.runtime.experts_chosen == sum(stats.outcomes.values())
    assert stats.visits == 3 * (model.tierd.runtime.step + 1)
    model.tierd.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_device_tier_holds_its_budget_and_changes_no_token(olmoe, unmodified, dtype):
    unmodified = unmodified.to(dtype)
    expert = 3 * 64 * 32 * torch.finfo(dtype).bits // 8
    model = load(olmoe / "store", dtype=dtype, in_process=True, vram=str(12 * expert))
    result = compare(unmodified, model, prompt())
    tier, stats = model.tierd.runtime.device_tier, model.tierd.stats
    assert result.greedy_match
    assert 0 < len(tier) <= 12
    assert tier.nbytes == len(tier) * expert <= tier.budget
    assert 0 < stats.tiers["vram"] < stats.requested == model.tierd.runtime.experts_chosen
    assert stats.requested == sum(stats.outcomes.values())
    assert tier.uploads == stats.requested - stats.tiers["vram"]
    model.tierd.close()
    assert tier.nbytes == len(tier) == 0


def test_two_models_on_one_daemon_outlive_it_and_go_on_with_the_same_tokens(olmoe, unmodified, tmp_path):
    ids, options = prompt(8), {"do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = unmodified.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **options)
    with daemons_in(tmp_path) as start:
        daemon = start(olmoe / "store", "--arena", "25%", "--history", "off")
        models = [load(daemon.name, dtype="float32") for _ in range(2)]
        halves = [
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options) for model in models
        ]
        asked = daemon.stats()["requests"]["requests"]
        assert asked == sum(model.tierd.runtime.experts_chosen for model in models)
        daemon.kill()
        daemon.start()
        for model, half in zip(models, halves, strict=True):
            whole = model.generate(half, attention_mask=torch.ones_like(half), max_new_tokens=6, **options)
            assert whole.tolist() == expected.tolist()
            model.tierd.close()


@pytest.mark.gpu
@pytest.mark.parametrize("vram", [None, "300KB"])
def test_a_gpu_computes_what_the_unmodified_model_computes_there(olmoe, unmodified, vram):
    model = load(olmoe / "store", device="cuda", dtype=torch.float32, arena="25%", vram=vram)
    result = compare(unmodified.cuda(), model, prompt().cuda())
    assert result.greedy_match
    assert result.max_logit_error < 1e-4
    assert (model.tierd.stats.tiers.get("vram", 0) > 0) == (vram is not None)
    model.tierd.close()


def test_a_budget_below_one_expert_is_refused(olmoe):
    with pytest.raises(UsageError, match="holds no expert"):
        load(olmoe / "store", in_process=True, vram="1000")


@pytest.mark.parametrize("experts", ["bf16", "int8", "int4-g64"])
def test_every_format_gives_the_weights_that_it_stands_for(olmoe, experts, tmp_path):
    store = ExpertStore.open(to_store(olmoe / "checkpoint", tmp_path / "store", experts=experts))
    layout = store.layout(1)
    record = store.read_record(1, 5)
    given = RecordReader(layout, torch.float32).weights(torch.from_numpy(record))
    views = layout.views(record)
    for name, found in (("gate", given.up[:32]), ("up", given.up[32:]), ("down", given.down)):
        match experts:
            case "bf16":
                expected = (views[name].astype(np.uint32) << 16).view(np.float32)
            case "int8":
                expected = dequantise_int8(views[name], views[f"{name}.scales"])
            case _:
                expected = dequantise_int4(views[name], views[f"{name}.scales"], found.shape[1])
        assert np.array_equal(found.numpy(), expected)


def test_quantised_experts_answer_like_the_weights_that_they_stand_for(olmoe, unmodified, tmp_path):
    store = to_store(olmoe / "checkpoint", tmp_path / "store", experts="int4-g64")
    opened, model = ExpertStore.open(store), load(store, dtype="float32", in_process=True)
    rounded = copy.deepcopy(unmodified)
    with torch.no_grad():
        for layer in range(3):
            reader = RecordReader(opened.layout(layer), torch.float32)
            for expert in range(16):
                given = reader.weights(torch.from_numpy(opened.read_record(layer, expert)))
                rounded.model.layers[layer].mlp.experts.gate_up_proj[expert] = given.up
                rounded.model.layers[layer].mlp.experts.down_proj[expert] = given.down
    assert compare(rounded, model, prompt()).max_logit_error < 1e-5
    model.tierd.close()


@pytest.mark.parametrize("kind", ["f32", "ue8m0"])
def test_published_8_bit_floats_answer_like_the_weights_that_they_stand_for(kind, tmp_path, request):
    oracles = request.config.rootpath / "tests" / "oracles"
    codes, values = tmp_path / "codes", tmp_path / "values"
    command = [sys.executable, oracles / "quantise_folder.py", oracles / "qwen3_moe", codes, values, "--coding", "fp8"]
    subprocess.run([*command, *(["--scales", kind] if kind == "ue8m0" else [])], check=True, timeout=60)
    unmodified = transformers.AutoModelForCausalLM.from_pretrained(
        values, dtype=torch.float32, attn_implementation="eager"
    )
    store = ExpertStore.open(to_store(codes, tmp_path / "store"))
    assert store.manifest.expert_format == ("bf16" if kind == "ue8m0" else "f32")
    assert {info.dtype for info in store.manifest.dense} >= {"fp8"}
    model = load(store.path, dtype="float32", in_process=True, attn_implementation="eager")
    result = compare(unmodified.eval(), model, prompt() % 100)
    assert result.greedy_match
    assert result.max_logit_error < 1e-5
    model.tierd.close()


def test_batches_and_sampling_work_as_ever(olmoe, unmodified):
    model = load(olmoe / "store", arena="25%", prefetch=True)
    ids = torch.cat([prompt(9), prompt(9).flip(1)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "pad_token_id": 0, "do_sample": True}
    answers = []
    for each in (unmodified, model):
        torch.manual_seed(5)
        answers.append(each.generate(ids, **options).tolist())
    assert answers[0] == answers[1]
    model.tierd.close()


def test_gradients_saving_and_unbound_modules_are_refused(olmoe, unmodified):
    model = load(olmoe / "store", in_process=True)
    with pytest.raises(UsageError, match="cannot be saved"):
        model.save_pretrained("anywhere")
    embedded = model.get_input_embeddings()(prompt()).requires_grad_()
    with pytest.raises(UsageError, match="read only"):
        model(inputs_embeds=embedded)
    unmodified.set_experts_implementation("tierd")
    with pytest.raises(UsageError, match="no experts of a store"):
        unmodified(input_ids=prompt())
    model.tierd.close()


def test_a_cancelled_pass_ends_between_layers_and_the_next_one_is_right(olmoe, unmodified):
    model = load(olmoe / "store", in_process=True)
    runtime, seen = model.tierd.runtime, []
    runtime.cancelled = lambda: seen.append(1) or len(seen) > 1
    with pytest.raises(StepCancelled):
        model(input_ids=prompt())
    assert len(seen) == 2
    runtime.cancelled = None
    assert compare(unmodified, model, prompt()).greedy_match
    model.tierd.close()


def test_what_cannot_be_carried_is_refused_by_name(tmp_path, olmoe):
    dense = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=32, num_hidden_layers=1)
    transformers.LlamaForCausalLM(dense).save_pretrained(tmp_path / "dense")
    assert "LlamaForCausalLM keeps no routed experts" in check(tmp_path / "dense").reason
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nobody_knows"}')
    (tmp_path / "odd" / "model.safetensors").write_bytes((olmoe / "checkpoint" / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModel, match="no config that transformers"):
        Conversion.prepare(tmp_path / "odd", tmp_path / "store", planner=plan_by_transformers)
    lost = tmp_path / "lost"
    make("gpt_oss", lost)
    config = json.loads((lost / "config.json").read_text()) | {"num_local_experts": 9}
    (lost / "config.json").write_text(json.dumps(config))
    with pytest.raises(StoreDamaged, match="9 experts"):
        Conversion.prepare(lost, tmp_path / "other", planner=plan_by_transformers)


def test_the_check_is_a_command_with_one_json_object(olmoe):
    command = [sys.executable, "-m", "tierd", "integrations", "transformers", "--check", olmoe / "checkpoint", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["architecture"] == "OlmoeForCausalLM"
    assert found["supported"]
    assert found["greedy_match"]
    assert found["max_logit_error"] < 1e-5
