"""The forward pass of the Llama family in fused kernels.

    embed + norm -> per layer [qkv, rotate + store, attention, out, add + norm,
    gate-up + SiLU x mul, down, add + norm] -> head on the rows that sample

Each kernel waits for the one before it by itself where the device can do so (programmatic
dependent launch): weights are on their way while the kernel before drains.

Letters: M rows, E hidden size, H query heads, D head dim, S splits of a product, P positions, R
rows that sample, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.model import ModelConfig
from pdserve.config.rope import DynamicScaling
from pdserve.cuda.attention import AttentionRoom, LayerAttention
from pdserve.cuda.products import Products
from pdserve.cuda.step_rows import StepRows
from pdserve.cuda.tensor_ranks import TensorRanks, VocabularyShare
from pdserve.cuda.weights import LayerWeights, ModelWeights
from pdserve.cuda.workspace import RowBuffers, Workspace
from pdserve.errors import ConfigError
from pdserve.kernels.embedding import embed_and_norm, embed_share
from pdserve.kernels.norm import add_norm
from pdserve.kernels.rotary_store import rotate_and_store
from pdserve.layers.parallel import Shard
from pdserve.layers.rope_scaling import make_frequencies

NoteStored = Callable[[int], None]
"""Told, as a step is launched, up to which layer of the model, exclusive, its KV is stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryTables:
    """Cosines and sines of every position, float32 [P, D / 2]."""

    cos_PD: Tensor
    sin_PD: Tensor


def make_rotary_tables(
    config: ModelConfig, max_model_len: int, device: torch.device
) -> RotaryTables:
    """Computes the tables on the host, as the CPU's model does.

    Raises:
        ConfigError: each sequence would need tables of its own.
    """
    scaling = config.rope_scaling
    if isinstance(scaling, DynamicScaling) and max_model_len > scaling.original_max_position:
        raise ConfigError(
            "device cuda cannot stretch dynamic rope scaling: max_model_len must be at most "
            f"{scaling.original_max_position}, got {max_model_len}",
            settings=("device", "max_model_len"),
        )
    frequencies = make_frequencies(config.head_dim, config.rope_theta, scaling)
    angles = torch.outer(torch.arange(max_model_len).float(), frequencies.inverse)
    factor = frequencies.attention_factor
    return RotaryTables(
        cos_PD=(angles.cos() * factor).to(device), sin_PD=(angles.sin() * factor).to(device)
    )


class CudaModel:
    """Weights and kernels. Used by one thread, on one stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        tables: RotaryTables,
        workspace: Workspace,
        products: Products,
        attention: AttentionRoom,
        *,
        use_pdl: bool,
        ranks: TensorRanks | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Keeps all of them.

        Args:
            config: as large as this rank's part.
            weights: of it.
            tables: of all positions.
            workspace: of activations.
            products: into the workspace.
            attention: over the rank's heads.
            use_pdl: whether kernels may start while the ones before drain.
            ranks: those that have the other parts of each layer; None where there is one.
            shard: this rank's part; None is everything.
        """
        self.config = config
        self.ranks = ranks
        self._weights = weights
        self._tables = tables
        self._workspace = workspace
        self._products = products
        self.attention = attention
        self._use_pdl = use_pdl
        self._has_embedding = shard is None or shard.is_first_stage
        self.has_head = shard is None or shard.is_last_stage
        self._fence = torch.zeros(1, dtype=torch.int32, device=weights.final_gain_E.device)

    def buffers(self, num_rows: int) -> RowBuffers:
        """Returns where a step's activations are before and after this stage."""
        return self._workspace.rows(num_rows)

    @torch.inference_mode()
    def forward(
        self, rows: StepRows, kv: KvTensors, note_stored: NoteStored | None = None
    ) -> Tensor | None:
        """Computes every row and writes its KV.

        Returns:
            This rank's logits, overwritten by the next step; None if no row samples.
        """
        hidden = self.compute_hidden(rows, kv, note_stored)
        return None if hidden is None or not self.has_head else self.score_share(hidden)

    @torch.inference_mode()
    def score_share(self, hidden_ME: Tensor) -> Tensor:
        """Returns logits of normed rows, as many as the workspace has room for.

        Returns:
            float32 [R, tokens of this rank]; a lone rank has the whole vocabulary.
        """
        return self._products.logits(hidden_ME, self._weights.head_VE)

    @property
    def vocabulary_share(self) -> VocabularyShare | None:
        """What the logits of this rank are of; None is everything."""
        if self.ranks is None or not self.has_head:
            return None
        first, count = self._weights.first_token_id, self._weights.head_VE.shape[0]
        return VocabularyShare(
            ranks=self.ranks,
            token_ids=range(first, first + count),
            max_tokens=-(-self.config.vocab_size // self.ranks.size),
            gather=self._gather,
        )

    def score(self, hidden_ME: Tensor) -> Tensor:
        """Returns logits over the whole vocabulary."""
        logits = self.score_share(hidden_ME)
        return logits if self.ranks is None else self._gather(logits)

    def _gather(self, logits_RN: Tensor) -> Tensor:
        assert self.ranks is not None
        return self.ranks.gather(logits_RN, self._workspace.all_logits(logits_RN.shape[0]))

    @torch.inference_mode()
    def compute_hidden(
        self, rows: StepRows, kv: KvTensors, note_stored: NoteStored | None = None
    ) -> Tensor | None:
        """Computes all but the head; returns the normed rows that sample, None if there are none.

        They are overwritten by the next step. A stage that has no head returns all rows.
        """
        weights, buffers = self._weights, self._workspace.rows(rows.num_rows)
        gains = [layer.input_gain_E for layer in weights.layers]
        if self._has_embedding:
            self._embed(rows, gains[0], buffers)
        else:
            # As the embedding does: nothing starts before the step's tables are written.
            self._fence.zero_()
        gains = [*gains[1:], weights.final_gain_E]
        last = len(weights.layers) - 1
        for index, (layer, next_gain_E) in enumerate(zip(weights.layers, gains, strict=True)):
            read = self._store(index, layer, rows, buffers, kv)
            if note_stored is not None:
                note_stored(weights.first_layer + index + 1)
            if index < last or not self.has_head or rows.sample_rows_R is None:
                heads = self.attention.attend(buffers.q_MHD, read, rows, buffers.heads_MHD)
            elif rows.sample_rows_R.shape[0] == 0:
                return None
            else:
                # Past its KV, the last layer matters only to rows that sample.
                buffers = self._attend_for_samples(read, rows, rows.sample_rows_R, buffers)
                heads = buffers.heads_MHD
            self._finish(layer, next_gain_E, buffers, heads)
        return buffers.normed_ME

    def _embed(self, rows: StepRows, gain_E: Tensor, buffers: RowBuffers) -> None:
        """Embeds, and norms for the first layer.

        Launched when all before it has ended: later kernels read tables, lengths and KV of earlier
        steps before they wait.
        """
        weights, epsilon = self._weights, self.config.rms_norm_eps
        residual, normed = buffers.residual_ME, buffers.normed_ME
        if self.ranks is None:
            embed_and_norm(
                rows.token_ids_M, weights.embedding_VE, residual, gain_E, normed, epsilon=epsilon
            )
            return
        # Exact: all ranks but one add zero.
        found = self._workspace.product((1, *residual.shape), residual.dtype)
        embed_share(rows.token_ids_M, weights.embedding_VE, weights.first_token_id, found[0])
        self.ranks.add_norm(found, residual, gain_E, normed, epsilon=epsilon, has_residual=False)

    def _store(
        self,
        index: int,
        layer: LayerWeights,
        rows: StepRows,
        buffers: RowBuffers,
        kv: KvTensors,
    ) -> LayerAttention:
        """Makes queries of a layer's normed rows and stores their keys and values."""
        config, place = self.config, self._weights.first_layer + index
        keys, values = kv.layer(index)
        qkv = self._products.multiply(buffers.normed_ME, layer.qkv_NE)
        rotate_and_store(
            qkv,
            rows.positions_M,
            rows.slots_M,
            self._tables.cos_PD,
            self._tables.sin_PD,
            keys,
            values,
            buffers.q_MHD,
            num_heads=config.num_heads,
            bias_N=layer.qkv_bias_N,
            q_gain_D=layer.q_gain_D,
            k_gain_D=layer.k_gain_D,
            epsilon=config.rms_norm_eps,
            is_rotated=place not in config.unrotated_layers,
            use_pdl=self._use_pdl,
        )
        return LayerAttention(keys_SJD=keys, values_SJD=values, window=config.window_of(place))

    def _attend_for_samples(
        self, read: LayerAttention, rows: StepRows, wanted_R: Tensor, buffers: RowBuffers
    ) -> RowBuffers:
        """Attends in the last layer; returns the buffers of the rows that go on."""
        picked = self._workspace.picked(wanted_R.shape[0], buffers.inner_MN)
        torch.index_select(buffers.residual_ME, 0, wanted_R, out=picked.residual_ME)
        if self.attention.can_attend_for_last_rows(rows):
            torch.index_select(buffers.q_MHD, 0, wanted_R, out=picked.q_MHD)
            self.attention.attend_for_last_rows(picked.q_MHD, read, rows, picked.heads_MHD)
        else:
            heads = self.attention.attend(buffers.q_MHD, read, rows, buffers.heads_MHD)
            torch.index_select(heads, 0, wanted_R, out=picked.heads_MHD)
        return picked

    def _finish(
        self, layer: LayerWeights, next_gain_E: Tensor, buffers: RowBuffers, heads_MHD: Tensor
    ) -> None:
        """Does the rest of a layer, and the norm of whatever comes next."""
        multiply = self._products.multiply
        out = multiply(heads_MHD.flatten(1), layer.out_EN, layer.out_bias_E)
        self._add_norm(out, layer.mlp_gain_E, buffers)
        self._products.multiply_gated(
            buffers.normed_ME, layer.gate_up_NE, buffers.inner_MN, layer.gate_up_bias_N
        )
        down = multiply(buffers.inner_MN, layer.down_EN, layer.down_bias_E)
        self._add_norm(down, next_gain_E, buffers)

    def _add_norm(self, sums_SME: Tensor, gain_E: Tensor, buffers: RowBuffers) -> None:
        if self.ranks is not None:
            self.ranks.add_norm(
                sums_SME,
                buffers.residual_ME,
                gain_E,
                buffers.normed_ME,
                epsilon=self.config.rms_norm_eps,
            )
            return
        add_norm(
            sums_SME,
            buffers.residual_ME,
            gain_E,
            buffers.normed_ME,
            epsilon=self.config.rms_norm_eps,
            use_pdl=self._use_pdl,
        )
