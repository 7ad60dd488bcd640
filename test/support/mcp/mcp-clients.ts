// The official MCP clients, unmodified, as their users set them up for a server that wants a bearer token: the SDK of
// version 1, the client of version 2, and the inspector's command line.
import { mkdtempSync } from "node:fs";
import { join } from "node:path";
import { Client as Client2, StreamableHTTPClientTransport as Transport2 } from "@modelcontextprotocol/client";
import { Client as Client1 } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport as Transport1 } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ResourceListChangedNotificationSchema,
} from "@modelcontextprotocol/sdk/types.js";
import { temporaryRoot } from "../gateway/process.ts";

export interface Endpoint {
  readonly url: string;
  readonly token: string;
  /** What the client sends its requests with. */
  readonly fetch?: (input: string | URL | Request, init?: RequestInit) => Promise<Response>;
}

export interface McpClient {
  readonly sessionId: string | undefined;
  serverName(): string | undefined;
  /** The names. */
  tools(): Promise<string[]>;
  call(name: string, given?: Record<string, unknown>, onprogress?: () => void): Promise<unknown>;
  /** Resolves when the server says that its resources are others now. */
  readonly resourcesChanged: Promise<void>;
  /** Ends the session at the server. */
  terminate(): Promise<void>;
  close(): Promise<void>;
}

export type OpenClient = (endpoint: Endpoint) => Promise<McpClient>;

/** What the model and the user of the client say whenever they are asked. */
export const MODEL_SAYS = "the duck says quack";
export const USER_SAYS = "Donald";

const INFO = { name: "test client", version: "1.0.0" };
const CAPABILITIES = { sampling: {}, elicitation: {}, roots: {} };
const sampled = () => ({
  role: "assistant" as const,
  model: "duck",
  content: { type: "text" as const, text: MODEL_SAYS },
});
const elicited = () => ({ action: "accept" as const, content: { name: USER_SAYS, username: USER_SAYS } });

const transportOptions = ({ token, fetch }: Endpoint) => ({
  requestInit: { headers: { authorization: `Bearer ${token}` } },
  ...(fetch !== undefined && { fetch }),
});

export const openVersion1: OpenClient = async (endpoint) => {
  const transport = new Transport1(new URL(endpoint.url), transportOptions(endpoint));
  const client = new Client1(INFO, { capabilities: CAPABILITIES });
  const changed = Promise.withResolvers<void>();
  client.setRequestHandler(CreateMessageRequestSchema, sampled);
  client.setRequestHandler(ElicitRequestSchema, elicited);
  client.setNotificationHandler(ResourceListChangedNotificationSchema, () => changed.resolve());
  // The transport's optional session ID is undefined at first, which its own interface does not say.
  await client.connect(transport as Parameters<typeof client.connect>[0]);
  return {
    get sessionId() {
      return transport.sessionId;
    },
    serverName: () => client.getServerVersion()?.name,
    tools: async () => (await client.listTools()).tools.map(({ name }) => name),
    call: (name, given = {}, onprogress) =>
      client.callTool({ name, arguments: given }, undefined, onprogress && { onprogress }),
    resourcesChanged: changed.promise,
    terminate: () => transport.terminateSession(),
    close: () => client.close(),
  };
};

const negotiating =
  (mode: "legacy" | "auto"): OpenClient =>
  async (endpoint) => {
    const transport = new Transport2(new URL(endpoint.url), transportOptions(endpoint));
    const client = new Client2(INFO, { capabilities: CAPABILITIES, versionNegotiation: { mode } });
    const changed = Promise.withResolvers<void>();
    client.setRequestHandler("sampling/createMessage", sampled);
    client.setRequestHandler("elicitation/create", elicited);
    client.setNotificationHandler("notifications/resources/list_changed", () => changed.resolve());
    await client.connect(transport);
    return {
      get sessionId() {
        return transport.sessionId;
      },
      serverName: () => client.getServerVersion()?.name,
      tools: async () => (await client.listTools()).tools.map(({ name }) => name),
      call: (name, given = {}, onprogress) => client.callTool({ name, arguments: given }, onprogress && { onprogress }),
      resourcesChanged: changed.promise,
      terminate: () => transport.terminateSession(),
      close: () => client.close(),
    };
  };

export const openVersion2 = negotiating("legacy");

export const CLIENTS: Readonly<Record<string, OpenClient>> = {
  "the SDK of version 1": openVersion1,
  "the client of version 2": openVersion2,
  "the client of version 2, asking first for the newest protocol": negotiating("auto"),
};

const INSPECTOR = join(
  import.meta.dir,
  "../../../node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js",
);
const INSPECT_MS_MAX = 20_000;

/** What `mcp-inspector --cli` says of the server. Throws when it does not end well. */
export async function inspect({ url, token }: Endpoint, ...args: readonly string[]) {
  const home = mkdtempSync(join(temporaryRoot(), "inspector-"));
  const server = ["--transport", "http", "--server-url", url, "--header", `Authorization: Bearer ${token}`];
  const command = [process.execPath, INSPECTOR, "--cli", ...server, "--format", "json", ...args];
  const run = Bun.spawn(command, {
    cwd: home,
    env: { PATH: "/usr/bin:/bin", HOME: home },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: INSPECT_MS_MAX,
  });
  const [stdout, stderr, code] = await Promise.all([run.stdout.text(), run.stderr.text(), run.exited]);
  if (code !== 0) throw new Error(`the inspector ended with ${code}: ${stdout}${stderr}`);
  return JSON.parse(stdout).result;
}
