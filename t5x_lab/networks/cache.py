"""Keys and values of attention, and their caches for decoding.

Axis letters: B batch, T new tokens, S cache slots or key length, K heads of keys and values, H head size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from t5x_lab.ops.masks import Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """Keys and values of one layer, [B, S, K, H], or of a stack, [layers, B, S, K, H]."""

    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Key-value cache of one layer, [B, K, S, H]. Heads come before slots, which is the layout that attention reads.

    Attributes:
      key, value: keys and values.
      is_window: position p is in slot p % S, so that the cache has the last S positions. Otherwise it is in slot p.
    """

    key: jax.Array
    value: jax.Array
    is_window: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def filled(cls, keys_values: KeyValues, slots: int) -> "Cache":
        """Returns a cache of `slots` slots that starts with these keys and values."""
        padding = [(0, 0), (0, 0), (0, slots - keys_values.key.shape[1]), (0, 0)]
        padded = jax.tree.map(lambda x: jnp.pad(jnp.swapaxes(x, 1, 2), padding), keys_values)
        return cls(padded.key, padded.value)

    @classmethod
    def of_window(cls, keys_values: KeyValues, slots: int, lengths_B: jax.Array) -> "Cache":
        """Returns a cache of the last `slots` positions of rows with these lengths."""
        positions_BS = jnp.maximum(window_positions(lengths_B - 1, slots), 0)
        last = lambda x: jnp.take_along_axis(jnp.swapaxes(x, 1, 2), positions_BS[:, None, :, None], axis=2)
        return cls(last(keys_values.key), last(keys_values.value), is_window=True)

    @property
    def slots(self) -> int:
        return self.key.shape[2]

    @property
    def keys_values(self) -> KeyValues:
        return KeyValues(jnp.swapaxes(self.key, 1, 2), jnp.swapaxes(self.value, 1, 2))

    def extend(self, new: KeyValues, mask: Mask) -> tuple[KeyValues, Mask, "Cache"]:
        """Adds `new` [B, T, K, H], whose first position in each row is the mask's query offset.

        Returns:
          The keys and values that the new tokens may attend to, their mask, and the cache with the new tokens.
        """
        assert mask.query_offset is not None
        T = new.key.shape[1]
        if not self.is_window:
            cache = self._write(new, mask.query_offset)
            return cache.keys_values, mask, cache
        last_B = mask.query_offset + T - 1
        if T == 1:
            cache = self._write(new, mask.query_offset % self.slots)
            positions = window_positions(last_B, self.slots)
            return cache.keys_values, dataclasses.replace(mask, key_positions=positions), cache
        # The first of several new tokens attends to positions whose slots the last ones take.
        old = self.keys_values
        joined = jax.tree.map(lambda x, y: jnp.concatenate([x, y.astype(x.dtype)], axis=1), old, new)
        new_positions = mask.query_offset[:, None] + jnp.arange(T)[None]
        positions = jnp.concatenate([window_positions(mask.query_offset - 1, self.slots), new_positions], axis=1)
        kept_BS = (
            window_positions(last_B, self.slots) - mask.query_offset[:, None]
        )  # indices of new tokens, below 0 for old ones
        source_BS = jnp.where(kept_BS < 0, jnp.arange(self.slots), self.slots + kept_BS)
        take = lambda x: jnp.swapaxes(jnp.take_along_axis(x, source_BS[:, :, None, None], axis=1), 1, 2)
        cache = dataclasses.replace(self, key=take(joined.key), value=take(joined.value))
        return joined, dataclasses.replace(mask, key_positions=positions), cache

    def _write(self, new: KeyValues, slot_B: jax.Array) -> "Cache":
        """Writes `new` [B, T, K, H] to T slots of each row."""
        update = jax.vmap(lambda slots, x, start: jax.lax.dynamic_update_slice_in_dim(slots, x, start, axis=1))
        write = lambda slots, x: update(slots, jnp.swapaxes(x, 1, 2).astype(slots.dtype), slot_B)
        return dataclasses.replace(self, key=write(self.key, new.key), value=write(self.value, new.value))


def window_positions(last_B: jax.Array, slots: int) -> jax.Array:
    """Returns the position in each slot of a window's cache after the position `last_B`, int [B, S]; below 0 for none."""
    return last_B[:, None] - (last_B[:, None] - jnp.arange(slots)[None]) % slots
