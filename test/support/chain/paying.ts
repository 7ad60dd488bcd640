// A tenant whose calls are paid: a gateway with a settlement configuration that leads to a facilitator, priced agents,
// and what a caller of them does.

import type { Gateway } from "../gateway/gateway.ts";
import type { Client } from "./facilitator.ts";

// biome-ignore lint/suspicious/noExplicitAny: tests look into bodies of many shapes.
export type Json = any;

export interface Answer {
  readonly status: number;
  readonly headers: Headers;
  readonly text: string;
  /** The parsed body; undefined when it is empty. */
  readonly body: Json;
}

export interface PayingTenant {
  readonly name: string;
  /** Of the caller, in the form that every client takes. */
  readonly headers: Readonly<Record<string, string>>;
  send(method: string, path: string, json?: unknown, headers?: Readonly<Record<string, string>>): Promise<Answer>;
  /** Creates an agent and gives its ID. */
  agent(fields: object): Promise<string>;
  /** The URL of its calls. */
  callUrl(agentId: string): string;
  /** The poll view, held for `seconds` or until the call has ended. */
  poll(agentId: string, invocationId: string, seconds?: number): Promise<Json>;
}

/** The longest poll takes half of it: a gateway that says nothing fails the request that waits, and not the whole test. */
const ANSWER_MS_MAX = 60_000;

let serial = 0;

/** A tenant of its own, whose payments this client of this facilitator collects. */
export async function openPayingTenant(
  gateway: Gateway,
  facilitator: { readonly url: string; readonly client: Pick<Client, "bundle"> },
): Promise<PayingTenant> {
  const name = `tenant-${++serial}`;
  const token = await gateway.token({ tenant: name, user: "alice" });
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };

  async function send(
    method: string,
    path: string,
    json?: unknown,
    more: Readonly<Record<string, string>> = {},
  ): Promise<Answer> {
    const response = await fetch(`${gateway.url}${path}`, {
      method,
      headers: { ...headers, ...more },
      signal: AbortSignal.timeout(ANSWER_MS_MAX),
      ...(json !== undefined && { body: JSON.stringify(json) }),
    });
    const text = await response.text();
    const body = text === "" ? undefined : JSON.parse(text);
    return { status: response.status, headers: response.headers, text, body };
  }
  const need = async (status: number, sent: Promise<Answer>): Promise<Json> => {
    const answer = await sent;
    if (answer.status !== status) throw new Error(`${answer.status} instead of ${status}: ${answer.text}`);
    return answer.body;
  };

  const credential = {
    name: "facilitator",
    auth_type: "none",
    source: "managed",
    plaintext: facilitator.client.bundle,
  };
  const { id: facilitator_credential_ref } = await need(201, send("POST", "/v1/credentials", credential));
  const config = { facilitator_url: facilitator.url, facilitator_credential_ref };
  await need(200, send("PATCH", "/v1/settlement/config", config));
  return {
    name,
    headers,
    send,
    callUrl: (id) => `${gateway.url}/v1/proxy/${id}`,
    async agent(fields) {
      const { id } = await need(201, send("POST", "/v1/agents", { name: `agent ${++serial}`, ...fields }));
      return id;
    },
    poll: (id, invocation, seconds = 25) =>
      need(200, send("GET", `/v1/proxy/${id}/invocations/${invocation}`, undefined, { prefer: `wait=${seconds}` })),
  };
}
