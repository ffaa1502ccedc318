"""Functions of tests that are called beside a method of the package."""

import functools


def before(patch, owner, name, look):
    """Call `look` with the arguments of every call of a method, first."""
    method = getattr(owner, name)
    watched = functools.wraps(method)(lambda *args, **kwargs: (look(*args, **kwargs), method(*args, **kwargs))[1])
    patch.setattr(owner, name, watched)


def after(patch, owner, name, look):
    """Call `look` with the result and the arguments of every call of a method, which returns what it returned."""
    method = getattr(owner, name)

    def watched(*args, **kwargs):
        result = method(*args, **kwargs)
        look(result, *args, **kwargs)
        return result

    patch.setattr(owner, name, watched)
