// The body of an answer as it was sent, whatever it is encoded with.
import type { Answer } from "../../../src/http/client/exchange.ts";

export async function sentBytes({ body, whole }: Answer): Promise<Uint8Array> {
  return whole ?? new Response(body as ReadableStream<Uint8Array<ArrayBuffer>> | null).bytes();
}

export async function sentText(answer: Answer): Promise<string> {
  return new TextDecoder().decode(await sentBytes(answer));
}
