"""A vLLM server that routers talk to as they talk to our own engines: `diptych_protocol.wire`.

`middleware` starts it, `port` has the sockets, `service` answers the messages, and `engine` is the
only module that imports vLLM. `translation` performs no I/O.
"""
