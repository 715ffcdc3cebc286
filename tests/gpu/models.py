"""Public architectures with random weights, small, and random batches for them.

Their packages are imported where a model is made: tests are collected without them, and fail
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unet import UNet

__all__ = ["MODELS", "Batch", "Model", "tensors"]

VOCABULARY = 256
TOKENS = 24
SAMPLES = 6400  # 0.4 s
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model, and the arguments of its calls.

    Attributes:
        make: Makes it, with random weights, in training mode.
        batch: Makes keyword arguments of so many items on a device.
        marked: The function that must run eagerly, as ``package.module.function``; None if a graph
            takes everything.
        breaks: Number of its runs in one call.
        refused: The file with the operation that a capture refuses without a mark.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, str], Batch]
    marked: str | None = None
    breaks: int = 0
    refused: str = ""


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in tensors(part)]
    return []


def padding(count: int, length: int, device: str) -> Tensor:
    """Return a mask of rows that end early at random places: ``[count, length]``."""
    lengths = torch.randint(length // 2, length, (count, 1), device=device)
    return (torch.arange(length, device=device) < lengths).long()


def _tokens(count: int, length: int, device: str) -> Tensor:
    return torch.randint(3, VOCABULARY, (count, length), device=device)


# Masks are two-dimensional, with padding, as a tokenizer makes them. transformers reads them on the
# host to find out whether it can skip them, but not during a capture: then it always makes a full
# mask, so that no break is needed. Without a mask, an eager call therefore takes another kernel of
# SDPA than a capture, and results differ by rounding.
def _text_batch(count: int, device: str) -> Batch:
    return {
        "input_ids": _tokens(count, TOKENS, device),
        "attention_mask": padding(count, TOKENS, device),
        "use_cache": False,
        "return_dict": True,
    }


def _plain_text_batch(count: int, device: str) -> Batch:
    return {
        "input_ids": _tokens(count, TOKENS, device),
        "use_cache": False,
        "return_dict": True,
    }


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER)).train()


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


def _t5_batch(count: int, device: str) -> Batch:
    batch = _text_batch(count, device)
    return {**batch, "decoder_input_ids": _tokens(count, TOKENS // 2, device)}


def _mixtral(experts: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation=experts,
    )
    return MixtralForCausalLM(config).train()


def _mixtral_batched() -> nn.Module:
    # Gathers the weights of each token's experts: no shape depends on the routing.
    return _mixtral("batched_mm")


def _mixtral_looped() -> nn.Module:
    # A loop over the experts that have tokens, each with as many as were routed to it: the number
    # of rounds and the shapes depend on data.
    return _mixtral("eager")


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config).train()


def _vit_batch(count: int, device: str) -> Batch:
    return {"pixel_values": torch.randn(count, 3, 32, 32, device=device), "return_dict": True}


def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        conv_dim=(64,) * 7,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return Wav2Vec2Model(config).train()


def _speech_batch(count: int, device: str) -> Batch:
    return {"input_values": torch.randn(count, SAMPLES, device=device), "return_dict": True}


def _padded_speech_batch(count: int, device: str) -> Batch:
    # With lengths, the mask of the frames is made by writing a Python number at indices, which is
    # copied from the host: a capture on CUDA refuses that, one on the simulator does not.
    mask = padding(count, SAMPLES, device)
    return {**_speech_batch(count, device), "attention_mask": mask}


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=10)
        return model.train()

    return make


def _image_batch(count: int, device: str) -> Batch:
    return {"x": torch.randn(count, 3, 64, 64, device=device)}


def _sage() -> nn.Module:
    from torch_geometric.nn import GraphSAGE

    return GraphSAGE(32, 64, num_layers=3, out_channels=10, norm="layer_norm").train()


def _gcn() -> nn.Module:
    from torch_geometric.nn import GCN

    # Picks the edges that are not loops by a mask: a capture does not know their number.
    return GCN(32, 64, num_layers=2, out_channels=10).train()


def _graph_batch(count: int, device: str) -> Batch:
    nodes = 32 * count
    start = torch.arange(nodes, device=device).repeat(4)
    # No loops: their number would be a shape.
    step = torch.randint(1, nodes, start.shape, device=device)
    return {
        "x": torch.randn(nodes, 32, device=device),
        "edge_index": torch.stack([start, (start + step) % nodes]),
    }


def _unet() -> nn.Module:
    return UNet(channels=3, width=32).train()


def _unet_batch(count: int, device: str) -> Batch:
    return {
        "x": torch.randn(count, 3, 16, 16, device=device),
        "time": torch.randint(0, 1000, (count,), device=device),
    }


MODELS: dict[str, Model] = {
    "decoder": Model(_llama, _text_batch),
    "decoder without a mask": Model(_llama, _plain_text_batch),
    "encoder-decoder": Model(_t5, _t5_batch),
    "MoE, batched": Model(_mixtral_batched, _text_batch),
    "MoE, with breaks": Model(
        _mixtral_looped,
        _text_batch,
        "transformers.models.mixtral.modeling_mixtral.MixtralExperts.forward",
        breaks=3,
        refused="mixtral/modeling_mixtral.py",
    ),
    "vision transformer": Model(_vit, _vit_batch),
    "speech encoder": Model(_wav2vec2, _speech_batch),
    "speech encoder, with breaks": Model(
        _wav2vec2,
        _padded_speech_batch,
        "transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2PreTrainedModel"
        "._get_feature_vector_attention_mask",
        breaks=1,
        refused="wav2vec2/modeling_wav2vec2.py",
    ),
    "ResNet": Model(_timm("resnet18"), _image_batch),
    "ConvNeXt": Model(_timm("convnext_atto"), _image_batch),
    "EfficientNet": Model(_timm("efficientnet_b0"), _image_batch),
    "GNN": Model(_sage, _graph_batch),
    "GNN, with breaks": Model(
        _gcn,
        _graph_batch,
        "torch_geometric.nn.conv.gcn_conv.gcn_norm",
        breaks=2,
        refused="utils/loop.py",
    ),
    "diffusion UNet": Model(_unet, _unet_batch),
}
