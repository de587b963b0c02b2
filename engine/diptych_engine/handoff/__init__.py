"""The engine's part in transfers of KV blocks between engines."""
