"""Foreign calls: the only place with system calls, ctypes, dlopen and ``cuda.bindings``.

One Protocol and one real class for each foreign API; the fakes in ``headrace.testing`` implement
the same Protocols.
"""
