"""Model shapes: exact parameter counts, FLOPs and activations by the published formulas."""

from __future__ import annotations

import dataclasses

import pytest

from poplar.hardware.model_shapes import ARCHITECTURES, Architecture, TrainingJob, architecture

PUBLISHED = {
    "llama-1.1b": 1_100_048_384,  # TinyLlama
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt-neo-2.7b": 2_651_307_520,
    "opt-350m": 331_196_416,
    "mpt-7b": 6_649_286_656,
    "bert-base": 109_514_298,  # with the head of masked language modeling, without a pooler
    "bert-large": 335_174_458,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameter_counts_equal_the_published_ones(name, parameters):
    assert architecture(name).numel == parameters


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-0.5b", 0.5e9), ("mpt-125m", 125e6), ("mpt-1b", 1.3e9)]
)
def test_parameter_counts_are_near_the_name(name, parameters):
    assert architecture(name).numel == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize("shape", ARCHITECTURES.values(), ids=lambda shape: shape.name)
def test_units_are_embeddings_blocks_and_head(shape):
    blocks = [f"block {layer}" for layer in range(shape.layers)]
    assert list(shape.units) == ["embedding", *blocks, "head"]
    assert len({shape.units[block] for block in blocks}) == 1
    assert sum(shape.units.values()) == shape.numel
    assert all(numel > 0 for numel in shape.units.values())


def test_an_unknown_model_raises_with_the_known_names():
    with pytest.raises(ValueError, match=r"unknown model 'llama-9000b'; use one of llama-0.5b, "):
        architecture("llama-9000b")


def test_flops_are_six_per_parameter_and_token_plus_attention():
    job = TrainingJob(architecture=architecture("mpt-7b"))
    attention = 12 * 32 * 4096 * 2048**2
    assert job.flops_per_sample == 6 * 6_649_286_656 * 2048 + attention


def test_lookup_tables_have_no_flops():
    tied = Architecture(
        name="tiny", hidden=8, layers=1, heads=1, mlp=32, vocabulary=100, sequence=16
    )
    own_head = dataclasses.replace(tied, tied=False)
    assert own_head.numel == tied.numel + 800
    assert own_head.multiplied_numel == tied.multiplied_numel


def test_activation_bytes_of_gpt_equal_korthikanti_et_al():
    job = TrainingJob(architecture=architecture("gpt2-124m"), sequence=1024)
    assert job.layer_bytes_per_sample == 1024 * 768 * 34


@pytest.mark.parametrize(("family", "more"), [("llama", 1.23), ("bert", 1.06)])
def test_activation_bytes_in_pytorch_match_the_docstring(family, more):
    transformers = pytest.importorskip("transformers")
    tokens, sizes = 256, {"num_attention_heads": 8, "vocab_size": 128, "hidden_size": 512}
    if family == "llama":
        sizes |= {"num_key_value_heads": 1, "intermediate_size": 1408}
        config, model = transformers.LlamaConfig, transformers.LlamaForCausalLM
    else:
        sizes |= {"intermediate_size": 2048, "attention_probs_dropout_prob": 0.0}
        config, model = transformers.BertConfig, transformers.BertForMaskedLM
    saved = [
        bytes_saved(model(config(num_hidden_layers=layers, **sizes)), tokens) for layers in (1, 2)
    ]
    shape = Architecture(
        name=family,
        gated=family == "llama",
        masked=family == "bert",
        hidden=512,
        layers=1,
        heads=8,
        key_value_heads=sizes.get("num_key_value_heads", 0),
        mlp=sizes["intermediate_size"],
        vocabulary=128,
        sequence=tokens,
        dropout=family == "bert",
    )
    expected = TrainingJob(architecture=shape).layer_bytes_per_sample
    assert (saved[1] - saved[0]) / expected == pytest.approx(more, abs=0.05)


def bytes_saved(model, tokens):
    """Bytes that autograd saves in a 16-bit forward, without parameters."""
    import torch

    model = model.to(torch.bfloat16).train()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (
                tensor,
                storage.nbytes(),
            )  # alive, so no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros(1, tokens, dtype=torch.long)).logits
    assert logits.requires_grad
    return sum(size for _, size in saved.values())


def test_checkpointing_saves_memory_and_adds_a_third_of_the_time():
    job = TrainingJob(architecture=architecture("llama-1.1b"))
    less = dataclasses.replace(job, checkpointing=True)
    assert less.activation_bytes_per_sample < job.activation_bytes_per_sample / 3
    assert less.recomputation == pytest.approx(4 / 3)
    assert less.flops_per_sample == job.flops_per_sample, "the model's, by which MFU is reckoned"
    assert less.produced_bytes_per_sample == job.activation_bytes_per_sample


def test_the_default_sequence_is_the_models_own():
    shape = architecture("bert-large")
    assert TrainingJob(architecture=shape).sequence == 512
    assert TrainingJob(architecture=shape, sequence=128).sequence == 128
    with pytest.raises(ValueError, match="positions for 512 tokens"):
        TrainingJob(architecture=shape, sequence=1024)
