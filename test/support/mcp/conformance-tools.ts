// The tools that the official conformance suite calls, each to the letter of what the suite says of it.
import type { RequestHandlerExtra } from "@modelcontextprotocol/sdk/shared/protocol.js";
import {
  type CallToolResult,
  type ContentBlock,
  CreateMessageResultSchema,
  type ElicitRequestFormParams,
  ElicitResultSchema,
  type ServerNotification,
  type ServerRequest,
  type Tool,
} from "@modelcontextprotocol/sdk/types.js";

type Extra = RequestHandlerExtra<ServerRequest, ServerNotification>;

interface RunnableTool extends Tool {
  run(given: Readonly<Record<string, unknown>>, extra: Extra): Promise<CallToolResult>;
}

/** One red pixel. */
export const IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg==";
/** A header and no samples. */
const AUDIO = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=";

const PAUSE_MS = 50;
/** Long enough that a client has come back for the stream before the answer is there. */
const AWAY_MS = 150;

const NOTHING = { type: "object" as const, properties: {} };
const text = (said: string): CallToolResult => ({ content: [{ type: "text", text: said }] });
const needs = (name: string) => ({
  type: "object" as const,
  properties: { [name]: { type: "string" } },
  required: [name],
});

const resource = (uri: string, mimeType: string, said: string): ContentBlock => ({
  type: "resource",
  resource: { uri, mimeType, text: said },
});

const picture: ContentBlock = { type: "image", data: IMAGE, mimeType: "image/png" };

/** A tool without arguments that always gives this. */
const giving = (name: string, description: string, ...content: ContentBlock[]): RunnableTool => ({
  name,
  description,
  inputSchema: NOTHING,
  run: async () => ({ content }),
});

async function elicit(
  extra: Extra,
  message: string,
  requestedSchema: ElicitRequestFormParams["requestedSchema"],
): Promise<string> {
  const params = { message, requestedSchema };
  const { action, content } = await extra.sendRequest({ method: "elicitation/create", params }, ElicitResultSchema);
  return `action=${action}, content=${JSON.stringify(content ?? {})}`;
}

/** A tool without arguments that asks the user for these fields. */
const asking = (
  name: string,
  description: string,
  properties: ElicitRequestFormParams["requestedSchema"]["properties"],
): RunnableTool => ({
  name,
  description,
  inputSchema: NOTHING,
  run: async (_, extra) =>
    text(`Elicitation completed: ${await elicit(extra, description, { type: "object", properties })}`),
});

const titled = (kind: string) =>
  ["First", "Second", "Third"].map((title, index) => ({
    const: `value${index + 1}`,
    title: `${title} ${kind}`,
  }));

const OPTIONS = ["option1", "option2", "option3"];

export const TOOLS: readonly RunnableTool[] = [
  giving("test_simple_text", "Gives text", {
    type: "text",
    text: "This is a simple text response for testing.",
  }),
  giving("test_image_content", "Gives an image", picture),
  giving("test_audio_content", "Gives audio", { type: "audio", data: AUDIO, mimeType: "audio/wav" }),
  giving(
    "test_embedded_resource",
    "Gives a resource",
    resource("test://embedded-resource", "text/plain", "This is an embedded resource content."),
  ),
  giving(
    "test_multiple_content_types",
    "Gives text, an image and a resource",
    { type: "text", text: "Multiple content types test:" },
    picture,
    resource("test://mixed-content-resource", "application/json", '{"test":"data","value":123}'),
  ),
  {
    name: "test_tool_with_logging",
    description: "Logs three times while it runs",
    inputSchema: NOTHING,
    async run(_, extra) {
      const log = (data: string) =>
        extra.sendNotification({ method: "notifications/message", params: { level: "info", data } });
      await log("Tool execution started");
      await Bun.sleep(PAUSE_MS);
      await log("Tool processing data");
      await Bun.sleep(PAUSE_MS);
      await log("Tool execution completed");
      return text("Logged three times.");
    },
  },
  {
    name: "test_tool_with_progress",
    description: "Tells its progress while it runs",
    inputSchema: NOTHING,
    async run(_, extra) {
      const progressToken = extra._meta?.progressToken;
      for (const progress of [0, 50, 100]) {
        if (progress > 0) await Bun.sleep(PAUSE_MS);
        if (progressToken === undefined) continue;
        const params = { progressToken, progress, total: 100 };
        await extra.sendNotification({ method: "notifications/progress", params });
      }
      return text("Told its progress.");
    },
  },
  {
    name: "test_error_handling",
    description: "Always fails",
    inputSchema: NOTHING,
    run: async () => ({ ...text("This tool intentionally returns an error for testing"), isError: true }),
  },
  {
    name: "test_sampling",
    description: "Asks the model of the client",
    inputSchema: needs("prompt"),
    async run(given, extra) {
      const content = { type: "text" as const, text: String(given["prompt"]) };
      const params = { messages: [{ role: "user" as const, content }], maxTokens: 100 };
      const request = { method: "sampling/createMessage" as const, params };
      const answer = await extra.sendRequest(request, CreateMessageResultSchema);
      return text(`LLM response: ${answer.content.type === "text" ? answer.content.text : answer.content.type}`);
    },
  },
  {
    name: "test_elicitation",
    description: "Asks the user of the client",
    inputSchema: needs("message"),
    run: async (given, extra) =>
      text(
        `User response: ${await elicit(extra, String(given["message"]), {
          type: "object",
          properties: {
            username: { type: "string", description: "User's response" },
            email: { type: "string", description: "User's email address" },
          },
          required: ["username", "email"],
        })}`,
      ),
  },
  asking("test_elicitation_sep1034_defaults", "Fields with defaults", {
    name: { type: "string", default: "John Doe" },
    age: { type: "integer", default: 30 },
    score: { type: "number", default: 95.5 },
    status: { type: "string", enum: ["active", "inactive", "pending"], default: "active" },
    verified: { type: "boolean", default: true },
  }),
  asking("test_elicitation_sep1330_enums", "Choices of every kind", {
    untitledSingle: { type: "string", enum: OPTIONS },
    titledSingle: { type: "string", oneOf: titled("Option") },
    legacyEnum: {
      type: "string",
      enum: ["opt1", "opt2", "opt3"],
      enumNames: ["Option One", "Option Two", "Option Three"],
    },
    untitledMulti: { type: "array", items: { type: "string", enum: OPTIONS } },
    titledMulti: { type: "array", items: { anyOf: titled("Choice") } },
  }),
  {
    name: "test_reconnection",
    description: "Closes its stream before its answer, for the client to come back",
    inputSchema: NOTHING,
    async run(_, extra) {
      extra.closeSSEStream?.();
      await Bun.sleep(AWAY_MS);
      return text("Answered on the stream that was resumed.");
    },
  },
  {
    name: "json_schema_2020_12_tool",
    description: "Has a schema of the 2020-12 draft",
    inputSchema: {
      $schema: "https://json-schema.org/draft/2020-12/schema",
      type: "object",
      $defs: {
        address: {
          type: "object",
          properties: { street: { type: "string" }, city: { type: "string" } },
        },
      },
      properties: { name: { type: "string" }, address: { $ref: "#/$defs/address" } },
      additionalProperties: false,
    },
    run: async (given) => text(JSON.stringify(given)),
  },
];
