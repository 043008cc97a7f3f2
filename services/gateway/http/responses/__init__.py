"""OpenAI's Responses API: converts bodies to chats, and answers to items and events."""
