"""Retraction of requests, and swapping of their pages to host memory."""
