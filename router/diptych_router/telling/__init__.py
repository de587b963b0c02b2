"""What a router tells of requests and engines: spans, reasons, reports, metrics and a page."""
