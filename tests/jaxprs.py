"""What a traced function consists of."""

import collections

import jax


def primitives(f, *args) -> collections.Counter:
    """How often each primitive occurs in the jaxpr of `f`; calls of jax_gg's kernels under the name of their target."""
    count: collections.Counter = collections.Counter()
    pending = [jax.make_jaxpr(f)(*args).jaxpr]
    while pending:
        for eqn in pending.pop().eqns:
            name = eqn.primitive.name
            count[eqn.params["target_name"] if name == "ffi_call" else name] += 1
            for leaf in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"):
                    pending.append(getattr(leaf, "jaxpr", leaf))
    return count


def kernel_calls(f, *args) -> int:
    """Calls of jax_gg's kernels in the jaxpr of `f`, which must have no loop."""
    count = primitives(f, *args)
    assert not {"scan", "while"} & set(count), count
    return sum(times for name, times in count.items() if name.startswith("jax_gg_"))
