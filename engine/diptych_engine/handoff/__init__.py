"""KV blocks on their way from another engine and to another one."""
