"""Anthropic's Messages API: converts bodies to chats, and answers to content blocks and events."""
