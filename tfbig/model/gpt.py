"""The GPT: embedding, blocks, head. Knows nothing of ranks, meshes or strategies.

B = batch, T = time, D = width, V = vocabulary.
"""

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfbig import loss as loss_functions
from tfbig.config import ModelConfig
from tfbig.loss_config import LossConfig
from tfbig.model.attention_form import AttentionForm
from tfbig.model.block import SITE_EMBEDDING, TransformerBlock
from tfbig.model.chunked_loss import chunked_token_loss
from tfbig.model.context import Context
from tfbig.model.dropout import dropout, sample_keys
from tfbig.model.embedding import TokenAndPositionEmbedding
from tfbig.model.initialization import initialize
from tfbig.model.layers import Projection, make_norm
from tfbig.model.recomputation import run_blocks
from tfbig.model.shared_loss import SharedHead
from tfbig.model.tensor_split import WHOLE, TensorSplit
from tfbig.variables import is_narrow, variable_specs

POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


class GPT(keras.Model):
    """A GPT, or the blocks of it that one pipeline stage holds.

    Args:
      config: the whole model.
      block_range: (first, last + 1) of the blocks built here; None means all. The first stage has
        the embedding, the last one the head.
      seed: keys initial values and dropout.
      precision: "float32", "bfloat16" or "float16"; variables are float32 in each.
      initial_values: False leaves variables at zero for a checkpoint to fill.
      split: which part of each layer's width is built here; all of it by default.
      attention: "auto" or one of `attention_form.FORMS`: how the scores are computed.
      chunked_head: makes the head's gradient with its loss, so that no product is made twice: for
        where one backward pass follows each forward pass and each is of many tokens.
      activation_checkpointing: what backward makes again, "none", "block", "group_N", "attention".
      offload_horizon: has the inputs of checkpointed blocks wait in host memory, see HostStore.
      loss: what training minimises.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_range: tuple[int, int] | None = None,
        *,
        seed: int = 0,
        precision: str = "float32",
        initial_values: bool = True,
        split: TensorSplit = WHOLE,
        attention: str = "auto",
        chunked_head: bool = True,
        activation_checkpointing: str = "none",
        offload_horizon: int | None = None,
        loss: LossConfig = loss_functions.PLAIN,
        name: str = "gpt",
    ) -> None:
        policy = keras.dtype_policies.get(POLICIES[precision])
        super().__init__(name=name, dtype=policy)
        self.config, self.seed, self.split = config, seed, split
        self.block_range = block_range or (0, config.num_layers)
        first, stop = self.block_range
        self.has_embedding, self.has_head = first == 0, stop == config.num_layers
        self._chunked_head, self._offload_horizon = chunked_head, offload_horizon
        self._checkpointing, self._loss = activation_checkpointing, loss
        self._form = AttentionForm(
            attention,
            config.attention_dropout,
            split.part(config.num_heads)[0],
            recomputes=activation_checkpointing == "attention",
        )
        with keras.name_scope(self.name):
            self._make_layers(policy)
        self.built = True
        # A model that is called without a context counts its own calls as steps.
        self._num_calls = tf.Variable(0, dtype=tf.int64, trainable=False)
        if initial_values:
            initialize(config, seed, self.canonical_variables(), split)

    @classmethod
    def from_config(cls, config: ModelConfig, block_range=None, **kwargs) -> "GPT":
        """Returns the model, or the stage of it, that `config` describes."""
        return cls(config, block_range, **kwargs)

    def _make_layers(self, policy: keras.DTypePolicy) -> None:
        config = self.config
        self.embedding_layer = self.final_norm = self.dense = None
        if self.has_embedding or (self.has_head and config.tied_head):
            self.embedding_layer = TokenAndPositionEmbedding(
                config.max_length,
                config.vocab_size,
                config.embed_dim,
                with_positions=self.has_embedding and config.position_embedding == "learned",
                split=self.split,
                name="embedding_layer",
                dtype=policy,
            )
        self.transformer_blocks = [
            self._make_block(index, policy) for index in range(*self.block_range)
        ]
        if self.has_head and config.final_norm:
            self.final_norm = make_norm(config.embed_dim, config.norm_epsilon, "final_norm", policy)
        if self.has_head and not config.tied_head:
            self.dense = Projection(
                (config.embed_dim,),
                (self.split.part(config.vocab_size)[1],),
                use_bias=config.head_bias,
                name="dense",
                dtype=policy,
            )

    def _make_block(self, index: int, policy: keras.DTypePolicy) -> TransformerBlock:
        config = self.config
        return TransformerBlock(
            config.embed_dim,
            config.num_heads,
            config.hidden_dim,
            config.dropout,
            head_dim=config.attention_head_dim,
            norm_order=config.norm_order,
            norm_epsilon=config.norm_epsilon,
            activation=config.activation,
            parallel_residual=config.parallel_residual,
            rotary_dim=config.rotary_dim,
            rotary_base=config.rotary_base,
            attention_rate=config.attention_dropout,
            index=index,
            seed=self.seed,
            split=self.split,
            form=self._form,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            name=f"transformer_blocks_{index}",
            dtype=policy,
        )

    def canonical_variables(self) -> dict[str, keras.Variable]:
        """Returns this model's trainable variables by canonical path, in forward order."""
        parts: list[tuple[str, keras.layers.Layer | None]] = [
            ("embedding_layer", self.embedding_layer)
        ]
        for offset, block in enumerate(self.transformer_blocks):
            parts.append((f"transformer_blocks/{self.block_range[0] + offset}", block))
        parts += [("final_norm", self.final_norm), ("dense", self.dense)]
        variables = {}
        for prefix, layer in parts:
            if layer is None:
                continue
            for variable in layer.trainable_variables:
                # Every sublayer is named, so what follows the part's own name is canonical.
                suffix = variable.path.split(f"{layer.name}/", 1)[1]
                variables[f"{prefix}/{suffix}"] = variable
        order = [spec.path for spec in variable_specs(self.config) if spec.path in variables]
        assert len(order) == len(variables), "a variable is missing from the table of variables"
        return {path: variables[path] for path in order}

    def compute_weights(self, values: Mapping[str, tf.Variable]) -> dict[str, tf.Tensor]:
        """Returns weights as the layers compute with them.

        Kernels and biases are in the compute dtype, embedding tables and norms in float32.

        Args:
          values: float32, by canonical path, in forward order.
        """
        return {path: tf.cast(value, self.weight_dtype(path)) for path, value in values.items()}

    def weight_dtype(self, path: str) -> str:
        """Returns the dtype that the layers compute with a weight in."""
        return self.compute_dtype if is_narrow(path) else "float32"

    def embed(self, tokens: tf.Tensor, context: Context | None = None) -> tf.Tensor:
        """Returns the hidden state (B, T, D) that enters the first block."""
        context = context or self._own_context(tokens, training=False)
        assert self.embedding_layer is not None and self.has_embedding, "no embedding here"
        hidden = self.embedding_layer(tokens, context.position)
        rate = self.config.embedding_dropout
        if not context.training or rate == 0.0:
            return hidden
        keys = sample_keys(self.seed, context.step, -1, SITE_EMBEDDING, context.sample_index)
        return dropout(hidden, keys, rate, self.split.first_position(hidden.shape[1]))

    def logits(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns the logits (B, T, V), in the compute dtype, of the last block's output.

        Where the vocabulary is shared, V is this part's, padding included.
        """
        hidden = self._head_input(hidden)
        if self.dense is not None:
            return self.dense(hidden)
        assert self.embedding_layer is not None, "this stage has no head"
        table = self.embedding_layer.token_emb.table()  # (V, D)
        flat = tf.reshape(hidden, [-1, self.config.embed_dim])  # (B*T, D)
        logits = tf.matmul(flat, table, transpose_b=True)
        shape = tf.concat([tf.shape(hidden)[:-1], [table.shape[0]]], 0)
        return tf.reshape(logits, shape)  # (B, T, V)

    def last_logits(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns the logits (B, V) of one position a row, hidden (B, D), for decoding."""
        if self.dense is not None:
            return self.logits(hidden[:, tf.newaxis])[:, 0]
        assert self.embedding_layer is not None, "this stage has no head"
        return self.embedding_layer.token_emb.products(self._head_input(hidden))

    def _head_input(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns what the head's weight multiplies, (B, T, D)."""
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return self.split.enter(hidden, "head")

    def _head_weights(self) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the head's weight, (D, V) or a tied table's (V, D), and its bias (V,) or None."""
        if self.dense is None:
            assert self.embedding_layer is not None, "this stage has no head"
            return tf.convert_to_tensor(self.embedding_layer.token_emb.embeddings), None
        bias = self.dense.bias
        kernel = tf.convert_to_tensor(self.dense.kernel)
        return kernel, None if bias is None else tf.convert_to_tensor(bias)

    def head_loss(
        self, hidden: tf.Tensor, labels: tf.Tensor, loss_mask: tf.Tensor, training: bool = True
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns (loss_sum, row_loss_sum, row_num_tokens, row_num_correct); see tfbig.loss.

        Args:
          hidden: (B, T, D), the last block's output.
          labels: (B, T) int32.
          loss_mask: (B, T), 1 where a label counts.
          training: whether the loss will be differentiated.
        """
        terms = self._loss if training else loss_functions.PLAIN
        if not labels.shape.is_fully_defined() and self.split.size == 1:
            return loss_functions.head_loss(self.logits(hidden), labels, loss_mask, terms)
        weight, bias = self._head_weights()
        arguments = (
            tf.reshape(self._head_input(hidden), [-1, self.config.embed_dim]),  # (B*T, D)
            weight,
            bias,
            tf.reshape(labels, [-1]),
            tf.reshape(loss_mask, [-1]),
        )
        is_table = self.dense is None
        # float16's loss scale must be in the gradient before it is rounded, so not afterwards.
        if self._chunked_head and self.split.size == 1 and self.compute_dtype != "float16":
            found = chunked_token_loss(*arguments, is_table, with_gradient=training, terms=terms)
        else:
            head = SharedHead(is_table, self.split, self.config.vocab_size, terms)
            found = head.loss(*arguments)
        summed, token_loss, predicted = found
        token_loss, predicted = (tf.reshape(x, labels.shape) for x in (token_loss, predicted))
        sums = loss_functions.sums_by_row(token_loss, predicted, labels, loss_mask)
        return tf.cast(summed, tf.float32), *sums[1:]

    def hidden_state(self, tokens: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the last block's output (B, T, D)."""
        return self.run_blocks(self.embed(tokens, context), context)

    def run_blocks(self, hidden: tf.Tensor, context: Context) -> tf.Tensor:
        """Returns the last block's output (B, T, D) of the first one's input."""
        how = self._checkpointing, self._offload_horizon
        return run_blocks(self.transformer_blocks, hidden, context, *how)

    def call(self, tokens: tf.Tensor, training: bool = False, context: Context | None = None):
        """Returns the logits (B, T, V) of tokens (B, T)."""
        context = context or self._own_context(tokens, training)
        return self.logits(self.hidden_state(tokens, context))

    def _own_context(self, tokens: tf.Tensor, training: bool) -> Context:
        if training:
            step = self._num_calls.assign_add(1) - 1
        else:
            step = tf.constant(0, tf.int64)
        return Context(
            step=step,
            sample_index=tf.range(tf.shape(tokens, tf.int64)[0]),
            position=tf.range(tf.shape(tokens)[1]),
            document_ids=None,
            training=bool(training),
        )


class MyModel(GPT):
    """The original's model: its arguments, in its order, and `call` returns two tensors."""

    def __init__(
        self,
        maxlen: int,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        feed_forward_dim: int,
        num_layers: int,
        learning_rate: float = 1e-3,
        *,
        rate: float = 0.1,
        seed: int = 0,
        precision: str = "float32",
    ) -> None:
        config = ModelConfig(
            vocab_size=vocab_size,
            max_length=maxlen,
            embed_dim=embed_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            head_dim=embed_dim,
            feed_forward_dim=feed_forward_dim,
            norm_order="post",
            norm_epsilon=1e-6,
            final_norm=False,
            activation="relu",
            tied_head=False,
            head_bias=True,
            dropout=rate,
            scale_residual_init=False,
        )
        super().__init__(config, seed=seed, precision=precision, name="my_model")
        self.learning_rate = learning_rate

    def call(
        self, tokens: tf.Tensor, training: bool = False, context: Context | None = None
    ) -> Sequence[tf.Tensor]:
        """Returns [logits (B, T, V), embeddings (B, T, D)]."""
        context = context or self._own_context(tokens, training)
        embeddings = self.embed(tokens, context)
        return [self.logits(self.run_blocks(embeddings, context)), embeddings]


def init_train_settings(
    maxlen: int,
    vocab_size: int,
    embed_dim: int,
    num_heads: int,
    feed_forward_dim: int,
    num_layers: int,
    learning_rate: float,
) -> tuple[MyModel, keras.optimizers.Optimizer, keras.losses.Loss]:
    """Returns the original's model, optimizer and loss.

    Args:
      maxlen: positions.
      vocab_size: tokens.
      embed_dim: width D.
      num_heads: heads, each as wide as the model.
      feed_forward_dim: width of the feed-forward layer.
      num_layers: blocks.
      learning_rate: of Adam.
    """
    model = MyModel(
        maxlen, vocab_size, embed_dim, num_heads, feed_forward_dim, num_layers, learning_rate
    )
    optimizer = keras.optimizers.Adam(learning_rate)
    return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
