// Streamed calls as the contract's tests make them: through the client, or on a bare socket that is looked at byte by
// byte, of upstreams whose answers come piece by piece.
import { afterAll, expect } from "bun:test";
import { type RawConnection, startRawUpstream } from "../support/http/upstream.ts";
import type { Answer, Contract, Json, Tenant } from "./contract.ts";
import { connect, type Wire } from "./wire.ts";

/** The head of a bare answer in chunks. */
export const HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n";
export const MIB = 1024 * 1024;
const encode = (text: string) => new TextEncoder().encode(text);
export const stream = (tenant: Tenant, id: string, sending: object = { json: { n: 1 } }) =>
  tenant.send("POST", `/v1/proxy/${id}/stream`, sending);
export const idOf = (answer: Answer) => answer.headers.get("x-service-invocation-id") ?? "";

/** A body whose pieces the test lets go one by one. */
export function paced(headers: Record<string, string> = { "content-type": "text/plain" }) {
  const pieces = new TransformStream<Uint8Array, Uint8Array>();
  const writer = pieces.writable.getWriter();
  writer.closed.catch(() => {});
  return {
    response: () => new Response(pieces.readable, { headers }),
    send: (text: string) => void writer.write(encode(text)).catch(() => {}),
    end: () => void writer.close().catch(() => {}),
  };
}

/** For the tests of one file: upstreams on the bare socket, which stop after them. */
export function rawUpstreams(): (onRequest: (connection: RawConnection) => void) => string {
  const raws: { stop(): Promise<void> }[] = [];
  afterAll(() => Promise.all(raws.map((raw) => raw.stop())));
  return (onRequest) => {
    const raw = startRawUpstream(onRequest);
    raws.push(raw);
    return raw.url;
  };
}

export function streamsOf(at: Contract) {
  const agentAt = async (upstream_url: string, fields: object = {}) => {
    const tenant = at.tenant();
    const { id } = await tenant.agent({ upstream_url, ...fields });
    return { tenant, id: String(id) };
  };
  /** The request on a bare socket, whose answer is then looked at byte by byte. */
  const open = async (tenant: Tenant, id: string, body = "{}"): Promise<Wire> => {
    const wire = await connect(at.gateway.url);
    const head = [
      `POST /v1/proxy/${id}/stream HTTP/1.1`,
      "Host: gateway.test",
      `Authorization: Bearer ${await tenant.token()}`,
      "Content-Type: application/json",
      `Content-Length: ${body.length}`,
    ];
    await wire.send(`${head.join("\r\n")}\r\n\r\n${body}`);
    return wire;
  };
  /** The only invocation of the tenant, when it has ended. */
  const only = async (tenant: Tenant): Promise<Json> => {
    for (;;) {
      const { data } = (await tenant.send("GET", "/v1/invocations")).body;
      expect(data.length).toBeLessThan(2);
      const [row] = data;
      if (row !== undefined && row.completed_at !== null) return tenant.detail(row.id);
      await Bun.sleep(20);
    }
  };
  return { agentAt, open, only };
}
