//! Files of an ext4 on a store that no kernel mounts.

use crate::error::{ExceptionParts, OrRaise};
use crate::on_store::OnStore;
use crate::operation::PyOperation;
use crate::store::{PyStore, fill};
use crate::view::PyView;
use crate::wait;
use nvme_host::Catalog;
use nvme_host::catalog::HeaderSource;
use nvme_host::files::{self, FileInode, FileLocation, MountedFile, PlacedFile};
use nvme_host::loader::ModelLayers;
use pyo3::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Facts about an inode: kind, mode, number, bytes, links, user, group, names of flags, generation, and seconds
/// and nanoseconds of the last change of its data and of the inode.
type About = (
    &'static str,
    u32,
    u32,
    u64,
    u16,
    u32,
    u32,
    Vec<&'static str>,
    u32,
    (i64, u32),
    (i64, u32),
);

/// A name in a directory, and its inode.
type Named = (Cow<'static, [u8]>, About);

/// Facts about an extent: its first byte in the file and in the store, its bytes, and True if they were
/// written.
type Extent = (u64, u64, u64, bool);

fn about(inode: &FileInode) -> About {
    (
        inode.kind.name(),
        inode.kind.mode_bits() | u32::from(inode.permissions),
        inode.number,
        inode.size,
        inode.links,
        inode.uid,
        inode.gid,
        inode.flag_names(),
        inode.generation,
        inode.modified,
        inode.changed,
    )
}

/// Splits `DEVICE:/path` into device, partition and path; None for other text.
#[pyfunction]
pub fn location(text: &str) -> PyResult<Option<(String, Option<u32>, String)>> {
    if !FileLocation::is_one(text) {
        return Ok(None);
    }
    let found = FileLocation::parse(text).or_raise()?;
    Ok(Some((found.device, found.part, found.path)))
}

/// An ext4, only read.
#[pyclass(frozen, module = "nvme_gpu._native", name = "Volume")]
pub struct PyVolume(OnStore<files::Ext4Volume>);

#[pymethods]
impl PyVolume {
    #[new]
    #[pyo3(signature = (store, part=None))]
    fn new(py: Python<'_>, store: &PyStore, part: Option<u32>) -> PyResult<Self> {
        let open = store.get()?;
        let volume = wait::of(py, move || Ok(files::Ext4Volume::open(&open, part)?))?;
        Ok(Self(OnStore::new(store, "volume", volume)))
    }

    /// Returns the superblock facts of the file system, as JSON.
    fn info(&self) -> PyResult<String> {
        let volume = self.0.get()?;
        let info = volume.info();
        let found = serde_json::json!({
            "label": info.label,
            "uuid": files::uuid_text(&info.uuid),
            "block_bytes": info.block_bytes,
            "blocks": info.blocks,
            "inodes": info.inodes,
            "has_checksums": info.has_checksums,
            "has_errors": info.has_errors,
            "damage": volume.damage(),
        });
        Ok(found.to_string())
    }

    /// Returns the inode that `path` names; of a link itself without `follows`.
    fn stat(&self, py: Python<'_>, path: Vec<u8>, follows: bool) -> PyResult<About> {
        let volume = self.0.get()?;
        wait::of(py, move || {
            let inode = match follows {
                true => volume.stat(&path)?,
                false => volume.stat_link(&path)?,
            };
            Ok(about(&inode))
        })
    }

    /// Returns names in a directory, each with its inode.
    fn entries(&self, py: Python<'_>, path: Vec<u8>) -> PyResult<Vec<Named>> {
        let volume = self.0.get()?;
        wait::of(py, move || {
            let entries = volume.list(&path)?.into_iter();
            let entries = entries.map(|(entry, inode)| (entry.name.into(), about(&inode)));
            Ok(entries.collect())
        })
    }

    fn read_link(&self, py: Python<'_>, path: Vec<u8>) -> PyResult<Cow<'static, [u8]>> {
        let volume = self.0.get()?;
        wait::of(py, move || Ok(Cow::Owned(volume.read_link(&path)?)))
    }

    /// Opens the file at `path` of this volume of `store`.
    fn open(&self, py: Python<'_>, store: &PyStore, path: Vec<u8>) -> PyResult<PyDriveFile> {
        let volume = self.0.get()?;
        let file = wait::of(py, move || {
            Ok(Arc::new(AnyFile::Drive(volume.file(&path)?)))
        })?;
        Ok(PyDriveFile(OnStore::new(store, "file", file)))
    }

    fn close(&self) {
        self.0.close();
    }
}

/// A file whose bytes a store reads.
pub enum AnyFile {
    /// A file of a volume.
    Drive(files::DriveFile),
    /// A file of an ext4 that the kernel has mounted.
    Mounted(PlacedFile),
}

impl AnyFile {
    /// Returns its bytes.
    pub fn source(&self) -> &dyn HeaderSource {
        match self {
            Self::Drive(file) => file,
            Self::Mounted(file) => file,
        }
    }

    fn about(&self) -> nvme_host::Result<About> {
        match self {
            Self::Drive(file) => Ok(about(file.inode())),
            Self::Mounted(file) => about_mounted(file.file()),
        }
    }

    fn extents(&self) -> nvme_host::Result<Vec<files::FileExtent>> {
        match self {
            Self::Drive(file) => file.extents().map(<[_]>::to_vec),
            Self::Mounted(file) => Ok(file.extents().to_vec()),
        }
    }

    /// Returns where bytes of the file lie in the store.
    ///
    /// # Errors
    /// For bytes in a hole or past the end.
    pub fn pieces(&self, offset: u64, bytes: u64) -> nvme_host::Result<Vec<Range<u64>>> {
        match self {
            Self::Drive(file) => file.pieces(offset, bytes),
            Self::Mounted(file) => file.pieces(offset, bytes),
        }
    }

    fn place(&self, offset: u64, bytes: u64) -> nvme_host::Result<u64> {
        match self {
            Self::Drive(file) => file.place(offset, bytes),
            Self::Mounted(file) => file.place(offset, bytes),
        }
    }

    fn catalog(&self) -> nvme_host::Result<Catalog> {
        match self {
            Self::Drive(file) => file.catalog(),
            Self::Mounted(file) => file.catalog(),
        }
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> nvme_host::Result<()> {
        match self {
            Self::Drive(file) => file.read_at(offset, data),
            Self::Mounted(file) => file.read_at(offset, data),
        }
    }

    /// # Errors
    /// For a file that is not the one that was opened.
    pub fn check_unchanged(&self) -> nvme_host::Result<()> {
        match self {
            Self::Drive(file) => file.check_unchanged(),
            Self::Mounted(file) => file.file().check_unchanged(),
        }
    }

    /// Returns `layers` of the catalog, read from where they lie.
    ///
    /// # Errors
    /// For bytes in a hole or past the end, with the name of the layer.
    pub fn layers(&self, layers: ModelLayers) -> nvme_host::Result<ModelLayers> {
        match self {
            Self::Drive(file) => file.layers(layers),
            Self::Mounted(file) => file.layers(layers),
        }
    }
}

/// Returns the inode of a file that the kernel has mounted, with the state in which it was opened.
fn about_mounted(file: &MountedFile) -> nvme_host::Result<About> {
    let (found, identity) = (file.metadata()?, file.identity());
    let nanoseconds = |part: i64| u32::try_from(part).unwrap_or(0);
    Ok((
        "file",
        found.mode(),
        u32::try_from(identity.inode).unwrap_or(u32::MAX),
        identity.bytes,
        u16::try_from(found.nlink()).unwrap_or(u16::MAX),
        found.uid(),
        found.gid(),
        vec!["immutable"],
        identity.generation,
        (identity.modified.0, nanoseconds(identity.modified.1)),
        (identity.changed.0, nanoseconds(identity.changed.1)),
    ))
}

/// A file of a volume, or of a mounted ext4, only read.
#[pyclass(frozen, module = "nvme_gpu._native", name = "DriveFile")]
pub struct PyDriveFile(OnStore<Arc<AnyFile>>);

impl PyDriveFile {
    /// # Errors
    /// When it is closed, and in a process that did not open it.
    pub fn get(&self) -> Result<Arc<AnyFile>, ExceptionParts> {
        self.0.get()
    }
}

#[pymethods]
impl PyDriveFile {
    /// Returns the immutable file at `path` of an ext4 that the kernel has mounted, whose block device `store`
    /// has.
    #[staticmethod]
    #[pyo3(signature = (store, path, part=None))]
    fn mounted(
        py: Python<'_>,
        store: &PyStore,
        path: PathBuf,
        part: Option<u32>,
    ) -> PyResult<Self> {
        let open = store.get()?;
        let file = wait::of(py, move || {
            let placed = PlacedFile::new(MountedFile::open(&path)?, &open, part)?;
            Ok(Arc::new(AnyFile::Mounted(placed)))
        })?;
        Ok(Self(OnStore::new(store, "file", file)))
    }

    fn stat(&self, py: Python<'_>) -> PyResult<About> {
        let file = self.get()?;
        wait::of(py, move || Ok(file.about()?))
    }

    fn extents(&self, py: Python<'_>) -> PyResult<Vec<Extent>> {
        let file = self.get()?;
        let extents = wait::of(py, move || Ok(file.extents()?))?.into_iter();
        let extents = extents.map(|one| (one.logical, one.place, one.bytes, one.is_written));
        Ok(extents.collect())
    }

    /// Returns the location in the store of bytes of the file: first byte and length of each piece.
    fn pieces(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<Vec<(u64, u64)>> {
        let file = self.get()?;
        let pieces = wait::of(py, move || Ok(file.pieces(offset, bytes)?))?.into_iter();
        Ok(pieces.map(|one| (one.start, one.end - one.start)).collect())
    }

    /// Returns the location in the store of bytes of the file, if they are contiguous.
    fn place(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<u64> {
        let file = self.get()?;
        wait::of(py, move || Ok(file.place(offset, bytes)?))
    }

    /// Fills `view` from byte `offset` of the file on.
    fn read(&self, view: Py<PyView>, offset: u64) -> PyResult<PyOperation> {
        let file = self.get()?;
        fill(view, move |data| file.read_at(offset, data))
    }

    /// Returns the tensors of the file as JSON.
    fn catalog(&self, py: Python<'_>) -> PyResult<String> {
        let file = self.get()?;
        wait::of(py, move || {
            let text = serde_json::to_string(&file.catalog()?);
            text.map_err(|error| ExceptionParts::usage(error.to_string(), "report it"))
        })
    }

    fn check_unchanged(&self, py: Python<'_>) -> PyResult<()> {
        let file = self.get()?;
        wait::of(py, move || Ok(file.check_unchanged()?))
    }
}
