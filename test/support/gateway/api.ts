// Requests to the API of a gateway, and an upstream that shows the secret which it was sent.
import { expect } from "bun:test";
import type { Gateway } from "./gateway.ts";

/** GET, or POST where there is a body. */
export function ask(gateway: Pick<Gateway, "url">, token: string, path: string, body?: unknown): Promise<Response> {
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  return fetch(`${gateway.url}${path}`, {
    headers,
    ...(body === undefined ? {} : { method: "POST", body: JSON.stringify(body) }),
  });
}

/** Of what was created. */
export async function idOf(response: Promise<Response>): Promise<string> {
  const answer = await response;
  expect(answer.status).toBe(201);
  return ((await answer.json()) as { id: string }).id;
}

/** Answers with the secret that came along. */
export function secretUpstream() {
  const server = Bun.serve({
    port: 0,
    hostname: "127.0.0.1",
    fetch: (request) => new Response(request.headers.get("authorization")),
  });
  return { url: server.url.href, [Symbol.dispose]: () => void server.stop(true) };
}

export const SECRET = "s3cret-of-the-upstream";

/** Its calls carry the secret, and leave receipts. */
export async function agentWithSecret(gateway: Gateway, token: string, url: string, name: string): Promise<string> {
  const credential = { name, source: "managed", auth_type: "bearer", plaintext: SECRET };
  const credential_ref = await idOf(ask(gateway, token, "/v1/credentials", credential));
  return idOf(ask(gateway, token, "/v1/agents", { name, upstream_url: url, credential_ref, emit_receipts: true }));
}
