"""Names of quantised and repacked copies lead to the models that they were made from."""

import pytest

from loraplex_services.registry.publish.base_names import is_copy


@pytest.mark.parametrize(
    ("named", "original"),
    [
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("unsloth/gemma-3-4b-it-unsloth-bnb-4bit", "google/gemma-3-4b-it"),
        ("unsloth/gemma-3-4b-it", "google/gemma-3-4b-it"),
        ("unsloth/mistral-7b-instruct-v0.3-bnb-4bit", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "meta-llama/Llama-3.1-8B-Instruct"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen/Qwen3-8B"),
        ("/home/me/models/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
    ],
)
def test_a_copy_is_recognised_by_its_name(named: str, original: str) -> None:
    assert is_copy(named, ["other/model", original])


@pytest.mark.parametrize(
    ("named", "other"),
    [
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-1B-Instruct"),
        ("unsloth/Qwen3-8B-Base-bnb-4bit", "Qwen/Qwen3-8B"),
        ("someone/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("someone/Qwen3-8B-tuned-AWQ", "Qwen/Qwen3-8B"),
        ("", "Qwen/Qwen3-8B"),
        ("unsloth/", "Qwen/Qwen3-8B"),
    ],
)
def test_other_models_are_not_taken_for_copies(named: str, other: str) -> None:
    assert not is_copy(named, [other])
