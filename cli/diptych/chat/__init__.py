"""`diptych chat`: a conversation with a running service, streamed over its OpenAI API."""
