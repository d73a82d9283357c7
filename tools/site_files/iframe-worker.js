// A page opened from a folder may not start a Worker. The search's script then runs in a hidden frame.
// Zensical adds a script from another host if none of ours has "iframe-worker" in its name.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = inside.document.createElement("script");
      script.src = new URL(address, document.baseURI).href;
      this.started = new Promise((done, failed) => {
        script.onload = done;
        script.onerror = failed;
      });
      this.started.catch((error) => this.onerror?.(error));
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.started.then(() => this.frame.contentWindow.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
