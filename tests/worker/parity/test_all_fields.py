"""Every field of PEFT's LoraConfig is decided: served as PEFT computes it, refused by its name, or
without effect. A field that a new PEFT adds fails here until somebody decides."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora import config as lora

from loraplex.adapter_format import Geometry, Report, geometry_from_folder, read_folder, validate
from loraplex.errors import InvalidAdapter
from tests.worker.parity.adapters import ATTENTION, draw
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.driving import Driver, Job, greedy
from tests.worker.parity.near_tie import Verdict
from tests.worker.parity.reference import Reference
from tests.worker.parity.runners import parity_runner
from tests.worker.parity.suite import MAX_LOGPROB_ERROR

SERVED: dict[str, dict[str, object]] = {
    "task_type": {"task_type": "CAUSAL_LM"},
    "peft_type": {},
    "base_model_name_or_path": {"base_model_name_or_path": "org/base"},
    "revision": {"revision": "main"},
    "r": {"r": 11},
    "target_modules": {"target_modules": r".*\.(k_proj|up_proj)"},
    "exclude_modules": {"exclude_modules": ["v_proj"]},
    "lora_alpha": {"lora_alpha": 3},
    "bias": {"bias": "none"},
    "use_rslora": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": ["lm_head", "norm"]},
    "init_lora_weights": {"init_lora_weights": "gaussian"},
    "layers_to_transform": {"layers_to_transform": 1},
    "layers_pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "rank_pattern": {"rank_pattern": {"q_proj": 3, r"layers\.1\.self_attn\.k_proj": 12}},
    "alpha_pattern": {"alpha_pattern": {r"^model\.layers\.0.*": 1}},
    "trainable_token_indices": {"trainable_token_indices": {"embed_tokens": [9, 3]}},
    "use_dora": {"use_dora": True},
    "alora_invocation_tokens": {"alora_invocation_tokens": [300, 301]},
    "lora_bias": {"lora_bias": True},
    "target_parameters": {"target_parameters": ["o_proj.weight"], "target_modules": ["q_proj"]},
    "ensure_weight_tying": {"ensure_weight_tying": True},
}
"""Field -> an adapter that uses it. More of each: `adapters.FEATURES`."""

WITHOUT_EFFECT: dict[str, dict[str, object]] = {
    "auto_mapping": {"task_type": None},
    "peft_version": {},
    "inference_mode": {"inference_mode": True},
    "lora_dropout": {"lora_dropout": 0.3},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "megatron_core": {"megatron_core": "some.core"},
    "loftq_config": {"loftq_config": {"loftq_bits": 4}},
    "eva_config": {"eva_config": lora.EvaConfig()},
    "corda_config": {"corda_config": lora.CordaConfig()},
    "lora_ga_config": {"lora_ga_config": lora.LoraGAConfig()},
    "velora_config": {"velora_config": {"num_groups": 2}},
    "qalora_group_size": {"qalora_group_size": 4},
    "runtime_config": {"runtime_config": lora.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
}
"""Field -> an adapter that sets it; the outputs are those of PEFT all the same."""

REFUSED: dict[str, dict[str, object]] = {
    "megatron_config": {"megatron_config": {"tensor_model_parallel_size": 1}},
    "use_qalora": {"use_qalora": True, "qalora_group_size": 8},
    "monteclora_config": {"monteclora_config": lora.MontecloraConfig()},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
    "use_bdlora": {"use_bdlora": lora.BdLoraConfig(target_modules_bd_a=["q_proj"])},
    "arrow_config": {"arrow_config": lora.ArrowConfig()},
    "kasa_config": {"kasa_config": lora.KasaConfig()},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "task_type": {"task_type": "TOKEN_CLS"},
}
"""Field -> a config that sets it, as PEFT writes it."""

USES = {**SERVED, **WITHOUT_EFFECT}
INITS = {"true": True, "false": False, "orthogonal": "orthogonal", "eva": "eva", "mica": "mica"}
MUTATING = ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq")


def test_every_field_of_the_installed_peft_is_decided() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == SERVED.keys() | WITHOUT_EFFECT.keys() | REFUSED.keys()


def save(base: TinyBase, folder: Path, seed: int, **fields: object) -> Path:
    """An adapter with random values."""
    given = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, **fields}
    model = peft.get_peft_model(copy.deepcopy(base.model), peft.LoraConfig(**given))
    draw(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return folder


def check(folder: Path, geometry: Geometry | None) -> Report:
    read = read_folder(folder)
    return validate(
        read.config_bytes, read.header_prefix, read.tensor_file_size, read.files, geometry
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return make_base("llama3-rope-tied", tmp_path_factory.mktemp("base"))


@pytest.mark.filterwarnings("ignore")
def test_fields_that_are_served_or_without_effect_give_the_tokens_of_peft(
    base: TinyBase, tmp_path: Path, near_ties: Verdict
) -> None:
    uses = USES | {f"init_{name}": {"init_lora_weights": value} for name, value in INITS.items()}
    geometry = geometry_from_folder(base.folder)
    driver = Driver(parity_runner(base.folder, arena_bytes=32 << 20))
    rng = random.Random(2)
    folders, jobs = {}, []
    for slot, (name, fields) in enumerate(uses.items()):
        folders[name] = save(base, tmp_path / name, slot, **fields)
        check(folders[name], geometry)
        driver.load(slot, folders[name])
        prompt = [rng.randrange(300) for _ in range(rng.randrange(2, 40))]
        request = greedy(name, prompt, 12, logprobs=0)
        if name == "alora_invocation_tokens":
            request.prompt_ids[-2:] = [300, 301]
            request.adapters_from = len(prompt) - 2
        jobs.append(Job(request, ((slot, 1.0),), rng.randrange(6)))
    driver.run(jobs, chunk=13)
    reference = Reference(base, folders)
    for name, job in zip(uses, jobs, strict=True):
        prompt, ours = job.request.prompt_ids, job.request.output_ids
        tokens = prompt + ours
        logits = reference.logits(name, tokens, len(prompt))
        again = partial(reference.logits64, name, tokens, len(prompt))
        near_ties.judge(len(prompt), ours, logits, again, name)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found = [sample.logprobs for sample in job.samples if sample.logprobs is not None]
        for entry, row in zip(found, expected, strict=True):
            assert abs(entry.logprob - row[entry.token_id].item()) < MAX_LOGPROB_ERROR, name


@pytest.fixture(scope="module")
def plain(base: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(base, tmp_path_factory.mktemp("plain"), 1)


def refusal_of(plain: Path, base: TinyBase, replaced: str = "", **fields: object) -> dict[str, str]:
    """What is said of a plain adapter under a config that PEFT wrote; `replaced`: its init."""
    given = {"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, **fields}
    peft.LoraConfig(**given).save_pretrained(plain)
    if replaced:
        path = plain / "adapter_config.json"
        path.write_text(path.read_text().replace('"pissa"', f'"{replaced}"'))
    with pytest.raises(InvalidAdapter) as caught:
        check(plain, geometry_from_folder(base.folder))
    return {v.field: v.description for v in caught.value.violations}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_not_served_are_refused_by_their_name(
    field: str, base: TinyBase, plain: Path
) -> None:
    assert f"adapter_config.json:{field}" in refusal_of(plain, base, **REFUSED[field])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", MUTATING)
def test_initialisations_that_changed_the_base_are_refused_with_the_way_out(
    init: str, base: TinyBase, plain: Path
) -> None:
    own = {"corda": {"corda_config": lora.CordaConfig()},
           "lora_ga": {"lora_ga_config": lora.LoraGAConfig()}}  # fmt: skip
    fields = {"init_lora_weights": init, **own.get(init, {})}
    if init == "loftq":  # its config asks for scipy to be made
        fields = {"init_lora_weights": "pissa"}
    said = refusal_of(plain, base, replaced=init, **fields)["adapter_config.json:init_lora_weights"]
    assert ("without LoftQ" if init == "loftq" else "registry convert") in said
