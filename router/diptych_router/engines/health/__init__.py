"""What a router makes of how engines fare: heartbeats, outcomes of requests, and room."""
