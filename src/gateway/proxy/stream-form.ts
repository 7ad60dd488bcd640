// What the body of a call on the streaming path asks of its agent: one JSON-RPC message or a batch of them.
import { bodyInSteps } from "../../concurrency/steps.ts";
import { Fault } from "../../core/fault.ts";
import { type CallBody, wholeOf } from "../../wire/body.ts";
import { parseRpcMessages, type RpcMessage, type RpcMessages, type RpcProblem } from "../../wire/jsonrpc.ts";
import type { CallKind, Form, ProxyCall } from "./checks.ts";
import { mcpVersion, passesMirrors } from "./request-headers.ts";

export interface StreamForm extends Form {
  readonly listsTools: boolean;
}

const PLAIN: StreamForm = {
  method: null,
  tool: null,
  calls: [{ tool: null }],
  mirrors: false,
  listsTools: false,
};

export const STREAMING: CallKind<StreamForm> = {
  suffix: "/stream",
  anyForm: async (body, { caller }) => {
    const bytes = await wholeOf(body, caller.tenant);
    const parsed = await bodyInSteps(bytes, parseRpcMessages(bytes), caller.tenant);
    return { ...PLAIN, listsTools: listsTools(parsed) };
  },
  formOf: async ({ protocol }, body, call) => (protocol === "mcp" ? messagesForm(body, call) : PLAIN),
};

async function messagesForm(body: CallBody, { headers, caller }: ProxyCall): Promise<StreamForm> {
  const bytes = await wholeOf(body, caller.tenant);
  const parsed = await bodyInSteps(bytes, parseRpcMessages(bytes), caller.tenant);
  if (!parsed.ok) throw new Fault("invalid_request", `body: ${parsed.problem}`);
  const { messages } = parsed;
  const calls = messages.filter(({ isCall }) => isCall);
  const shown = shownMessage(messages, calls);
  const only = parsed.isBatch ? null : (messages[0] ?? null);
  const mirrors = passesMirrors(headers, bytes, only, mcpVersion(headers) ?? only?.protocolVersion ?? null);
  const { method = null, tool = null } = shown ?? {};
  return { method, tool, calls, mirrors, listsTools: listsTools(parsed) };
}

function listsTools(parsed: RpcMessages | RpcProblem): boolean {
  return parsed.ok && parsed.messages.some(({ method }) => method?.endsWith("/list"));
}

/** For a batch the history shows its call, if it has exactly one. */
function shownMessage(messages: readonly RpcMessage[], calls: readonly RpcMessage[]): RpcMessage | undefined {
  if (messages.length === 1) return messages[0];
  return calls.length === 1 ? calls[0] : undefined;
}
