"""Which layer does what: roles derived from the nested configuration (docs/model.md 2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Text = Mapping[str, Any]
"""The `text_config` part of config.json."""


@dataclass(frozen=True)
class Layout:
    """Roles of the backbone layers of one configuration."""

    text: Text

    @property
    def layers(self) -> range:
        return range(self.text["num_hidden_layers"])

    @property
    def draft_layers(self) -> range:
        return range(self.text.get("num_nextn_predict_layers", 0))

    @property
    def n_encoder(self) -> int | None:
        """The first layer of ratio 1, or None when there is no such layer."""
        return next((layer for layer in self.layers if self.ratio(layer) == 1), None)

    def in_decoder(self, layer: int) -> bool:
        return self.n_encoder is not None and layer >= self.n_encoder

    def ratio(self, layer: int) -> int:
        return self.text["compress_ratios"][layer]

    def makes_kv(self, layer: int) -> bool:
        return layer in self.text["kv_source_layer_ids"]

    def makes_index(self, layer: int) -> bool:
        return layer in self.text["index_source_layer_ids"]

    def kv_source(self, layer: int) -> int:
        """Whose compressed KV and index keys this layer reads."""
        return max(s for s in self.text["kv_source_layer_ids"] if s <= layer)

    @property
    def candidate_source(self) -> int:
        """The layer that keeps candidate blocks, or -1."""
        source = self.text.get("candidate_source_layer_id")
        return -1 if source is None else source

    def uses_candidates(self, layer: int) -> bool:
        return 0 <= self.candidate_source < layer
