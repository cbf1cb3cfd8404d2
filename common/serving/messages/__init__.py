"""Anthropic's Messages API as another way to speak of chats: requests in, answers, events and errors out. No I/O."""
