// An MCP server that has everything which the official conformance suite asks a server for: stateful, with an event
// store, so that a stream which broke off can be resumed. Written on the SDK, with no gateway in mind.
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import {
  type EventStore,
  WebStandardStreamableHTTPServerTransport,
} from "@modelcontextprotocol/sdk/server/webStandardStreamableHttp.js";
import {
  CallToolRequestSchema,
  CompleteRequestSchema,
  GetPromptRequestSchema,
  type JSONRPCMessage,
  ListPromptsRequestSchema,
  ListResourcesRequestSchema,
  ListResourceTemplatesRequestSchema,
  ListToolsRequestSchema,
  type PromptMessage,
  ReadResourceRequestSchema,
  SubscribeRequestSchema,
  UnsubscribeRequestSchema,
} from "@modelcontextprotocol/sdk/types.js";
import { IMAGE, TOOLS } from "./conformance-tools.ts";

/** How long a client is told to wait before it comes again for a stream that was closed. */
const RETRY_MS = 50;
const PRIMED_SINCE = "2025-11-25";
const LOOPBACK = new Set(["127.0.0.1", "localhost"]);

const RESOURCES = [
  {
    uri: "test://static-text",
    name: "static text",
    description: "Text that never changes",
    mimeType: "text/plain",
    content: { text: "This is the content of the static text resource." },
  },
  {
    uri: "test://static-binary",
    name: "static binary",
    description: "An image that never changes",
    mimeType: "image/png",
    content: { blob: IMAGE },
  },
  {
    uri: "test://watched-resource",
    name: "watched",
    description: "Something to subscribe to",
    mimeType: "text/plain",
    content: { text: "Watched." },
  },
];

const says = (text: string): PromptMessage => ({ role: "user", content: { type: "text", text } });

const required = (...names: string[]) =>
  names.map((name) => ({ name, description: `The ${name} of the test`, required: true }));

type Arguments = Readonly<Record<string, string>>;

const PROMPTS = [
  {
    name: "test_simple_prompt",
    description: "A prompt without arguments",
    arguments: [],
    messages: () => [says("This is a simple prompt for testing.")],
  },
  {
    name: "test_prompt_with_arguments",
    description: "A prompt with two arguments",
    arguments: required("arg1", "arg2"),
    messages: (given: Arguments) => [says(`Prompt with arguments: arg1='${given["arg1"]}', arg2='${given["arg2"]}'`)],
  },
  {
    name: "test_prompt_with_embedded_resource",
    description: "A prompt with a resource in it",
    arguments: required("resourceUri"),
    messages: (given: Arguments): PromptMessage[] => [
      {
        role: "user",
        content: {
          type: "resource",
          resource: {
            uri: given["resourceUri"] ?? "",
            mimeType: "text/plain",
            text: "Embedded resource content for testing.",
          },
        },
      },
      says("Please process the embedded resource above."),
    ],
  },
  {
    name: "test_prompt_with_image",
    description: "A prompt with an image in it",
    arguments: [],
    messages: (): PromptMessage[] => [
      { role: "user", content: { type: "image", data: IMAGE, mimeType: "image/png" } },
      says("Please analyze the image above."),
    ],
  },
];

/** Keeps what was sent on every stream, in its order. */
function createEventStore(): EventStore {
  const events: { readonly streamId: string; readonly message: JSONRPCMessage }[] = [];
  return {
    async storeEvent(streamId, message) {
      events.push({ streamId, message });
      return String(events.length);
    },
    getStreamIdForEventId: async (id) => events[Number(id) - 1]?.streamId,
    async replayEventsAfter(lastId, { send }) {
      const streamId = events[Number(lastId) - 1]?.streamId ?? "";
      for (let next = Number(lastId); next < events.length; next++) {
        const event = events[next];
        // A priming event has an ID to come back with, and nothing to say.
        if (event?.streamId !== streamId || !("jsonrpc" in event.message)) continue;
        await send(String(next + 1), event.message);
      }
      return streamId;
    },
  };
}

function createServer(): Server {
  const server = new Server(
    { name: "conformance", version: "1.0.0" },
    {
      capabilities: {
        completions: {},
        logging: {},
        prompts: {},
        resources: { listChanged: true, subscribe: true },
        tools: {},
      },
    },
  );
  server.setRequestHandler(ListToolsRequestSchema, () => ({
    tools: TOOLS.map(({ name, description, inputSchema }) => ({ name, description, inputSchema })),
  }));
  server.setRequestHandler(CallToolRequestSchema, ({ params }, extra) => {
    const tool = TOOLS.find(({ name }) => name === params.name);
    if (tool === undefined) throw new Error(`there is no tool ${params.name}`);
    return tool.run(params.arguments ?? {}, extra);
  });
  server.setRequestHandler(ListResourcesRequestSchema, () => ({
    resources: RESOURCES.map(({ content: _, ...resource }) => resource),
  }));
  server.setRequestHandler(ListResourceTemplatesRequestSchema, () => ({
    resourceTemplates: [{ uriTemplate: "test://template/{id}/data", name: "template", description: "Data for an ID" }],
  }));
  server.setRequestHandler(ReadResourceRequestSchema, ({ params: { uri } }) => {
    const id = /^test:\/\/template\/(\w+)\/data$/.exec(uri)?.[1];
    if (id !== undefined) {
      const text = JSON.stringify({ id, templateTest: true, data: `Data for ID: ${id}` });
      return { contents: [{ uri, mimeType: "application/json", text }] };
    }
    const found = RESOURCES.find((resource) => resource.uri === uri);
    if (found === undefined) throw new Error(`there is no resource ${uri}`);
    return { contents: [{ uri, mimeType: found.mimeType, ...found.content }] };
  });
  server.setRequestHandler(SubscribeRequestSchema, () => ({}));
  server.setRequestHandler(UnsubscribeRequestSchema, () => ({}));
  server.setRequestHandler(ListPromptsRequestSchema, () => ({
    prompts: PROMPTS.map(({ messages: _, ...prompt }) => prompt),
  }));
  server.setRequestHandler(GetPromptRequestSchema, ({ params }) => {
    const prompt = PROMPTS.find(({ name }) => name === params.name);
    if (prompt === undefined) throw new Error(`there is no prompt ${params.name}`);
    return { messages: prompt.messages(params.arguments ?? {}) };
  });
  server.setRequestHandler(CompleteRequestSchema, ({ params }) => ({
    completion: { values: [`${params.argument.value}-1`], total: 1, hasMore: false },
  }));
  return server;
}

/**
 * The suite resumes a stream in the name of a version before 2025-11-25, and the SDK gives streams of those versions
 * nothing to resume by.
 */
function asPrimed(request: Request): Request {
  const headers = new Headers(request.headers);
  const version = headers.get("mcp-protocol-version");
  if (version !== null && version < PRIMED_SINCE) headers.set("mcp-protocol-version", PRIMED_SINCE);
  return new Request(request, { headers });
}

function refusal(status: number, message: string): Response {
  return Response.json({ jsonrpc: "2.0", id: null, error: { code: -32_000, message } }, { status });
}

export interface Arrived {
  readonly method: string;
  readonly headers: Headers;
  /** Aborted when the connection has gone before the answer was whole. */
  readonly signal: AbortSignal;
}

export interface ConformanceServer {
  readonly url: string;
  /** Every request so far. */
  readonly arrived: Arrived[];
  /** Resolves when the next event stream has been opened that belongs to no call. */
  listened(): Promise<void>;
  /** Tells all who listen that the resources are others now. */
  announce(): Promise<void>;
  /** The IDs of the sessions that clients have not ended. */
  sessions(): string[];
  stop(): Promise<void>;
}

export function startConformanceServer(): ConformanceServer {
  const sessions = new Map<
    string,
    { readonly server: Server; readonly transport: WebStandardStreamableHTTPServerTransport }
  >();
  const arrived: Arrived[] = [];
  let listened = Promise.withResolvers<void>();
  const open = async () => {
    const server = createServer();
    const transport = new WebStandardStreamableHTTPServerTransport({
      sessionIdGenerator: () => crypto.randomUUID(),
      onsessioninitialized: (id) => void sessions.set(id, { server, transport }),
      onsessionclosed: (id) => void sessions.delete(id),
      eventStore: createEventStore(),
      retryInterval: RETRY_MS,
    });
    await server.connect(transport);
    return transport;
  };
  const listener = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    async fetch(request) {
      const { hostname, pathname } = new URL(request.url);
      if (!LOOPBACK.has(hostname)) return refusal(403, "this host is not served");
      if (pathname !== "/mcp") return refusal(404, "the path is /mcp");
      const { method, headers, signal } = request;
      arrived.push({ method, headers, signal });
      const id = headers.get("mcp-session-id");
      const transport = id === null ? await open() : sessions.get(id)?.transport;
      if (transport === undefined) return refusal(404, "this session is not known");
      const response = await transport.handleRequest(asPrimed(request));
      if (method === "GET" && response.ok && !headers.has("last-event-id")) {
        listened.resolve();
        listened = Promise.withResolvers();
      }
      return response;
    },
  });
  return {
    url: `http://127.0.0.1:${listener.port}/mcp`,
    arrived,
    listened: () => listened.promise,
    async announce() {
      await Promise.all([...sessions.values()].map(({ server }) => server.sendResourceListChanged()));
    },
    sessions: () => [...sessions.keys()],
    async stop() {
      await Promise.all([...sessions.values()].map(({ server }) => server.close()));
      await listener.stop(true);
    },
  };
}
