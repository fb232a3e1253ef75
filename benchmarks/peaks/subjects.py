"""Models whose peak memory is predicted: equal units, wide units, and units of unequal size."""

from __future__ import annotations

import encoder
import llama
import prediction_models
from prediction_models import Batch, Subject, draw_masked_text, draw_text
from torch import nn

CONTEXT = prediction_models.CONTEXT


def _llama() -> nn.Module:
    return llama.Llama(llama.LlamaConfig(width=256, layers=12, heads=4, context=CONTEXT))


def _encoder() -> nn.Module:
    return encoder.Encoder(encoder.EncoderConfig(width=384, layers=4, heads=6, context=CONTEXT))


SUBJECTS: dict[str, Subject] = {
    "llama": Subject(new=_llama, loss=llama.next_byte_loss, draw=draw_text),
    "encoder": Subject(new=_encoder, loss=encoder.masked_byte_loss, draw=draw_masked_text),
    "convolutional": prediction_models.SUBJECTS["convolutional"],
}

__all__ = ["SUBJECTS", "Batch", "Subject"]
