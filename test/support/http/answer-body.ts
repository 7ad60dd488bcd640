// The body of an answer as it was sent, whatever it is encoded with.
import type { Answer } from "../../../src/http/client/answer.ts";

export async function sentBytes({ body }: Answer): Promise<Uint8Array> {
  return new Response(body as ReadableStream<Uint8Array<ArrayBuffer>> | null).bytes();
}

export async function sentText(answer: Answer): Promise<string> {
  return new TextDecoder().decode(await sentBytes(answer));
}
